"""Threads for work that would stop the event loop; they do one piece of a tenant at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

T = TypeVar("T")
Given = TypeVarTuple("Given")


class Offload:
    """A few threads. A tenant's next piece of work begins when its last one has ended: a tenant that sends
    many large requests waits for itself, and others find a free thread. For one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant: str, work: Callable[[*Given], T], *given: *Given) -> T:
        """Runs `work` in a thread and returns its result, or raises its error. A caller that is cancelled
        does not end work that has begun, and the tenant's turn lasts until that has ended."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        await turn.acquire()
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work, *given)
        except BaseException:
            turn.release()
            raise

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for a turn
                loop.call_soon_threadsafe(turn.release)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)
