"""Work that is no step: done on a thread, taken in between two steps."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeAlias, TypeVar

from coserve.engine.link import Done, Inbox
from coserve.errors import CoserveError

_T = TypeVar("_T")
Outcome: TypeAlias = _T | CoserveError


class Aside:
    """A few threads whose results come back through the inbox."""

    def __init__(self, inbox: Inbox, threads: int = 4) -> None:
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="aside")

    def do(self, work: Callable[[], _T], then: Callable[[Outcome[_T]], None]) -> None:
        """Runs `work` soon; the loop calls `then` with what it returned, or with its deliberate error.

        Any other exception is a bug: it is raised in the loop, and ends the process.
        """
        self._pool.submit(work).add_done_callback(
            lambda future: self._inbox.put(Done(partial(_finish, future, then)))
        )


def _finish(future: Future[_T], then: Callable[[Outcome[_T]], None]) -> None:
    try:
        outcome: Outcome[_T] = future.result()
    except CoserveError as error:
        outcome = error
    then(outcome)
