"""Recognises out-of-memory errors, and makes them outcomes of a pass or of one alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

from coserve.errors import TogetherFailed

T = TypeVar("T")

# Messages of torch's allocator and of oneDNN on a CPU, which has no class of error for it.
_WORDS: Final = ("can't allocate memory", "not enough memory", "out of memory", "out_of_memory", "bad_alloc")


_contains = True


def contain_nothing() -> None:
    """Has shortages of memory end this process, which is one of several that compute together: it would go
    on otherwise than the others do."""
    global _contains
    _contains = False


def contains() -> bool:
    """Tells whether failures of a part of a step may end that part alone."""
    return _contains


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


def run_shared(work: Callable[[], T]) -> T:
    """Runs a pass that several share. Raises TogetherFailed where memory runs out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        words = words_of(error)
    raise TogetherFailed(words)  # after the error, whose frames hold their tensors


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
