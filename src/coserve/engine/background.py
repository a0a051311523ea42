"""Background work: runs on a thread; the loop handles its outcome between two steps."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeAlias, TypeVar

from coserve.core.contained import contained
from coserve.engine.link import Done, Inbox
from coserve.errors import CoserveError, OutOfMemory
from coserve.memory.exhausted import is_out_of_memory

_T = TypeVar("_T")
Outcome: TypeAlias = _T | CoserveError


class Background:
    """A thread pool whose results return through the inbox."""

    def __init__(self, inbox: Inbox, threads: int = 4, name: str = "aside") -> None:
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def another(self, threads: int, name: str) -> "Background":
        """A separate pool with the same inbox, for work that must not queue behind other work."""
        return Background(self._inbox, threads, name)

    def close(self) -> None:
        """Ends the threads once they have done what they have begun; the rest is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def do(self, what: str, work: Callable[[], _T], then: Callable[[Outcome[_T]], None]) -> None:
        """Runs `work` on a thread; the loop then calls `then` with its result or its error, whose text names
        the work as `what`.

        If `then` raises on a result it is called once more with that error, to clean up.
        """
        self._pool.submit(work).add_done_callback(
            lambda future: self._inbox.put(Done(partial(_finish, what, future, then), what))
        )


def _finish(what: str, future: Future[_T], then: Callable[[Outcome[_T]], None]) -> None:
    try:
        outcome: Outcome[_T] = future.result()
    except BaseException as error:
        outcome = _failure(error, what)
    try:
        then(outcome)
    except BaseException as error:
        if isinstance(outcome, CoserveError):
            raise
        then(_failure(error, what))


def _failure(error: BaseException, what: str) -> CoserveError:
    if is_out_of_memory(error):
        return OutOfMemory(f"{what} failed: there was no memory for it")
    return contained(error, what)
