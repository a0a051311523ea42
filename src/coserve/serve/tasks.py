"""Tasks of an event loop that end with what they belong to."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Context beside which work goes on, in a task of this name."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await cancel(task)
