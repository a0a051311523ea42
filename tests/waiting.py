"""Waiting for what is to become so, and no longer than only a hang takes."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Final

PATIENCE: Final = 60.0  # seconds, on a machine that is busy
_NAP: Final = 0.001


async def until(holds: Callable[[], object], patience: float = PATIENCE) -> None:
    """Returns when something holds. Fails after `patience` seconds, with the line that asks for it."""
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"not so after {patience:g} s: {inspect.getsource(holds).strip()}"
        await asyncio.sleep(_NAP)


def wait_until(holds: Callable[[], object], patience: float = PATIENCE) -> None:
    """`until` for work of other threads. It makes no event loop: a test may count open files."""
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"not so after {patience:g} s: {inspect.getsource(holds).strip()}"
        time.sleep(_NAP)
