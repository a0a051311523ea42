"""Work that runs beside the engine's steps: at once, or on threads of a server."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from coserve.core.contained import contained
from coserve.errors import CoserveError, JobError

T = TypeVar("T")


class Aside(Protocol):
    """Runs work whose outcome is handled between two steps."""

    def do(self, what: str, work: Callable[[], T], then: Callable[[T | CoserveError], None]) -> None:
        """Runs `work`, and then `then` with its outcome; errors name the work as `what`."""

    def close(self) -> None:
        """Ends the threads, if there are any; work that has not begun is dropped."""


class AtOnce:
    """Runs work on the caller's thread, before anything else."""

    def do(self, what: str, work: Callable[[], T], then: Callable[[T | CoserveError], None]) -> None:
        """See `Aside`."""
        at_once(what, work, then)

    def close(self) -> None:
        """See `Aside`."""


def at_once(what: str, work: Callable[[], T], then: Callable[[T | CoserveError], None]) -> None:
    """Runs `work` now, and `then` with its outcome."""
    try:
        outcome: T | CoserveError = work()
    except BaseException as error:
        outcome = contained(error, what, JobError)
    then(outcome)
