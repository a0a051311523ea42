"""Work that is not part of a step: done on a thread; its outcome is taken in between two steps."""

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
    """A few threads whose results come back through the inbox."""

    def __init__(self, inbox: Inbox, threads: int = 4, name: str = "aside") -> None:
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def another(self, threads: int, name: str) -> "Background":
        """Threads of their own, for work that is not to wait for other work; the same inbox."""
        return Background(self._inbox, threads, name)

    def do(self, what: str, work: Callable[[], _T], then: Callable[[Outcome[_T]], None]) -> None:
        """Runs `work` soon; the loop calls `then` with what it returned, or with what it failed with: `what`
        says to people whose work that was.

        Where `then` itself fails with a result it is called once more, with that error; then it only has to
        give the work up.
        """
        self._pool.submit(work).add_done_callback(
            lambda future: self._inbox.put(Done(partial(_finish, what, future, then)))
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
