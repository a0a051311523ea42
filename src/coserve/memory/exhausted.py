"""Recognises out-of-memory errors, and makes errors outcomes of a pass or of one alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self, TypeVar

import torch

from coserve.core.contained import contained
from coserve.errors import (
    CoserveError,
    InternalError,
    OutOfMemory,
    PassFailed,
    ServerError,
    TogetherFailed,
)

T = TypeVar("T")
# Errors that are no outcome of any one's work: of a whole pass, of the process, of a device, which computes
# nothing after one.
_NOBODYS: Final = (PassFailed, ServerError, torch.AcceleratorError)

# Messages of torch's allocator and of oneDNN on a CPU, which has no class of error for it.
_WORDS: Final = ("can't allocate memory", "not enough memory", "out of memory", "out_of_memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an allocation failed: of a GPU's memory, of the processor's, or of Python's own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def words_of(error: BaseException) -> str:
    """The first line of an error, as an allocator's."""
    return str(error).partition("\n")[0] or type(error).__name__


def run_shared(work: Callable[[], T]) -> T:
    """Runs a pass that several share. Raises TogetherFailed where memory runs out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        words = words_of(error)
    raise TogetherFailed(words)  # after the error, whose frames hold their tensors


class SharedPass:
    """Surrounds a pass of `what`, which several share, and keeps that it failed, but not the error, whose
    frames hold tensors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._has_failed = False
        self._words: str | None = None  # of the allocator, where memory ran out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None and is_out_of_memory(error):
            self._words = words_of(error)
        elif error is None or isinstance(error, _NOBODYS):
            return False
        else:
            contained(error, self._what)
        self._has_failed = True
        return True

    def failed(self) -> bool:
        """Tells whether the pass failed for a reason other than memory, which is in the log, and for which
        one of those who share it fails alone as well. Raises TogetherFailed where memory ran out."""
        if self._words is not None:
            raise TogetherFailed(self._words)
        return self._has_failed


def run_together(what: str, work: Callable[[], T]) -> T | None:
    """Runs a pass of `what`, which several share. Raises TogetherFailed where memory runs out; None where it
    fails for another reason (`SharedPass.failed`)."""
    found = None
    with SharedPass(what) as shared:
        found = work()
    return None if shared.failed() else found


@contextmanager
def failing_alone(
    what: str, fail: Callable[[CoserveError], object], kind: type[CoserveError] = InternalError
) -> Iterator[None]:
    """Surrounds work for one alone: where memory runs out, or any other error is raised, it ends, and `fail`
    is given the error, of `kind` if nobody foresaw it. The words of an allocator are kept, the tensors of the
    failed frames are not."""
    failure: CoserveError | None = None
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            failure = OutOfMemory(f"{what} ran out of memory: {words_of(error)}")
        elif isinstance(error, _NOBODYS):
            raise
        else:
            failure = contained(error, what, kind)
    if failure is not None:  # after the error, whose frames hold their tensors
        fail(failure)


@contextmanager
def exhaustion(tell: Callable[[str], object]) -> Iterator[None]:
    """Surrounds work for one alone: where memory runs out it ends, and `tell` is given the allocator's
    words."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tell(words_of(error))
