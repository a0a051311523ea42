"""Work of tenants beside the event loop, one piece per tenant at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from coserve.sandbox.pool import Cancellation

T = TypeVar("T")
Given = TypeVarTuple("Given")


class TenantTurns:
    """One turn of each tenant at a time, so that nobody's work waits for a tenant with much of it. For one
    event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant: str) -> asyncio.Lock:
        """The lock of the tenant's turn."""
        return self._locks.setdefault(tenant, asyncio.Lock())


class Offload:
    """A thread pool that runs one piece of work of each tenant at a time, so that a tenant with many large
    requests does not block others. For one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._turns = TenantTurns()

    async def run(
        self,
        tenant: str,
        work: Callable[[*Given], T],
        *given: *Given,
        cancellation: Cancellation | None = None,
    ) -> T:
        """Runs `work` in a thread and returns its result, or raises its error. Cancelling the caller cancels
        `cancellation`, by which work in a sandbox ends; other work that has begun goes on. Either holds the
        tenant's turn until it ends."""
        turn = self._turns.of(tenant)
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
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if cancellation is not None:
                cancellation.cancel()
            raise
