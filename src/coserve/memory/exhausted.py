"""Recognises out-of-memory errors, and makes errors outcomes of a pass or of one alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

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

# Errors that are no outcome of any one's work: of a whole pass, of the process, of a device, which computes
# nothing after one.
_NOBODYS: Final = (PassFailed, ServerError, torch.AcceleratorError)

# Messages of torch's allocator and of oneDNN on a CPU, which has no class of error for it.
_WORDS: Final = ("can't allocate memory", "not enough memory", "out of memory", "out_of_memory", "bad_alloc")

_contains = True  # whether failures of a part of a step may end that part alone


def contain_nothing() -> None:
    """Has shortages of memory, and errors that nobody foresaw, end this process, which is one of several that
    compute together: it would go on otherwise than the others do."""
    global _contains
    _contains = False


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an allocation failed, of a GPU's memory, of the processor's, or of Python's own, and
    others can go on."""
    if not _contains:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def words_of(error: BaseException) -> str:
    """The first line of an error, as an allocator's."""
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def shared() -> Iterator[None]:
    """Surrounds work that several share. Raises TogetherFailed where memory runs out."""
    short: list[str] = []
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        short.append(words_of(error))
    if short:  # after the error, whose frames hold their tensors
        raise TogetherFailed(short[0])


@contextmanager
def together(what: str) -> Iterator[list[str]]:
    """Surrounds `what`, which several share. Raises TogetherFailed where memory runs out. Where it
    fails for another reason, which is in the log, it ends, and the list that this gives has its words:
    one of those who share it fails alone as well."""
    failed: list[str] = []
    try:
        with shared():
            yield failed
    except _NOBODYS:
        raise
    except BaseException as error:
        if not _contains:
            raise
        failed.append(str(contained(error, what)))  # not the error, whose frames hold their tensors


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
        elif isinstance(error, _NOBODYS) or not (_contains or isinstance(error, CoserveError)):
            raise
        else:
            failure = contained(error, what, kind)
    if failure is not None:  # after the error, whose frames hold their tensors
        fail(failure)
