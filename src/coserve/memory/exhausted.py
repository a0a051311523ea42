"""Recognises out-of-memory errors."""

from typing import Final

import torch

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
