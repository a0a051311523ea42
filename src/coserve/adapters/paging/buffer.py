"""Reads tensors of a safetensors file into a reused buffer.

The safetensors library maps a file and pages it in on first use: 20 ms for the 9.6 MB of an adapter of rank
8, against 3 here. The library has validated the file before; here it is only read.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from coserve.adapters.saved import TYPES
from coserve.errors import AdapterError

_LENGTH: Final = 8  # bytes before the header, which say how long it is
_KEPT: Final = 64 << 20  # most bytes that are kept for the next file


class Buffer:
    """Holds one file at a time: the next overwrites its tensors. Not thread-safe."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a file by name. Raises AdapterError where it cannot be read whole."""
        try:
            size = self._fill(file)
        except OSError as error:
            raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
        try:
            begin = _LENGTH + int.from_bytes(self._bytes[:_LENGTH], "little")
            header = json.loads(self._bytes[_LENGTH : min(begin, size)])
            header.pop("__metadata__", None)
            return {name: self._tensor(begin, size, one) for name, one in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AdapterError(f"{file} cannot be read: it is no safetensors file any more") from error

    def _fill(self, file: Path) -> int:
        """Reads a whole file; returns its size in bytes."""
        with file.open("rb", buffering=0) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            if len(self._bytes) < size or len(self._bytes) > _KEPT:
                self._bytes = bytearray(size)
            view, done = memoryview(self._bytes), 0
            while done < size and (count := opened.readinto(view[done:size])):
                done += count
        return done

    def _tensor(self, begin: int, size: int, one: dict[str, Any]) -> Tensor:
        """The tensor at the offsets of header entry `one`, relative to `begin`. Raises ValueError beyond the
        file's end."""
        dtype, shape, (start, end) = TYPES[one["dtype"]], one["shape"], one["data_offsets"]
        count = prod(shape)
        if not 0 <= start <= end <= size - begin or end - start != count * dtype.itemsize:
            raise ValueError("a tensor that is not in the file")
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=begin + start).view(shape)
