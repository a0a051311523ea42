"""Threads for work that would block the event loop, one piece per tenant at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

T = TypeVar("T")
Given = TypeVarTuple("Given")


class Offload:
    """A thread pool that runs one piece of work of each tenant at a time, so that a tenant with many large
    requests does not block others. For one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant: str, work: Callable[[*Given], T], *given: *Given) -> T:
        """Runs `work` in a thread and returns its result, or raises its error. Cancelling the caller does not
        stop work that has begun, which holds the tenant's turn until it ends."""
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
