"""Slower memory for the keys and values of sequences that are longer than the device's pages: a scratch file
beside a CPU, pinned memory of the host beside a GPU."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend
from coserve.attention.offloaded import BLOCK, CHUNK, OffloadedCache, OffloadTier, offloaded_page_nbytes
from coserve.config import EngineConfig
from coserve.errors import ConfigError
from coserve.model.base import Base
from coserve.streamed.free_ranges import Range
from coserve.streamed.scratch import ScratchFile, memory_of
from coserve.streamed.stored import ReadBuffer

_log = logging.getLogger(__name__)


class OffloadSpace:
    """Room for `pages` of long sequences, and their cache (None without room; `refusal` says why)."""

    def __init__(self, base: Base, attention: AttentionBackend[Any], config: EngineConfig) -> None:
        self.cache: OffloadedCache | None = None
        self.pages, self.refusal = 0, ""
        page_nbytes = offloaded_page_nbytes(base.caches, attention.page_size, base.dtype)
        pages = config.swap_nbytes // page_nbytes
        if config.deterministic:
            self.refusal = "the deterministic mode attends to pages alone"
        elif not pages:
            self.refusal = "engine.swap_space has no room for pages elsewhere"
        else:
            try:
                tier = _open(base.device, config.scratch, pages * page_nbytes)
            except ConfigError as error:
                self.refusal = str(error)
                _log.warning("prompts longer than the cache are refused: %s", error)
            else:
                self.cache, self.pages = (
                    OffloadedCache(base.caches, attention.page_size, base.dtype, tier),
                    pages,
                )


def _open(device: torch.device, folder: str, nbytes: int) -> OffloadTier:
    return OffloadFile(folder, nbytes) if device.type == "cpu" else OffloadMemory(device)


class OffloadFile:
    """An `OffloadTier` in a scratch file. A place is ranges of it, whose space is allocated."""

    def __init__(self, folder: str, nbytes: int) -> None:
        """Raises ConfigError for a folder that can hold nothing."""
        self._file = ScratchFile(folder, "keys and values of long prompts", nbytes)
        self._buffer: ReadBuffer | None = None

    def take(self, nbytes: int) -> Sequence[Range]:
        """See `OffloadTier`."""
        return self._file.take(nbytes)

    def free(self, place: Sequence[Range]) -> None:
        """See `OffloadTier`."""
        self._file.free(place)

    def write(self, place: Sequence[Range], start: int, data: Tensor) -> None:
        """See `OffloadTier`."""
        memory = memory_of(data)
        for at, first, count in _pieces(place, start, data.nbytes):
            self._file.put(at, memory[first : first + count])

    def read(self, place: Sequence[Range], start: int, nbytes: int) -> Tensor:
        """See `OffloadTier`."""
        skipped = start % BLOCK  # reads are of whole blocks
        whole = -(-(skipped + nbytes) // BLOCK) * BLOCK
        if self._buffer is None or len(self._buffer.bytes) < whole:
            self._buffer = ReadBuffer(max(whole, CHUNK + 2 * BLOCK))
        for at, first, count in _pieces(place, start - skipped, whole):
            self._file.file.read(at, self._buffer.bytes[first : first + count])
        return self._buffer.tensor[skipped : skipped + nbytes]


class OffloadMemory:
    """An `OffloadTier` in the host's memory, pinned beside a GPU. A place is a tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, nbytes: int) -> Tensor:
        """See `OffloadTier`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"the host's memory has no room for {nbytes} bytes: {error}") from error

    def free(self, place: Tensor) -> None:
        """See `OffloadTier`. The memory is given back with its last user."""

    def write(self, place: Tensor, start: int, data: Tensor) -> None:
        """See `OffloadTier`."""
        flat = data.view(torch.uint8).flatten()
        place[start : start + len(flat)].copy_(flat)

    def read(self, place: Tensor, start: int, nbytes: int) -> Tensor:
        """See `OffloadTier`."""
        return place[start : start + nbytes].to(self._device)


def _pieces(place: Sequence[Range], start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(place in the file, first byte, bytes) of the parts of `nbytes` from byte `start` of ranges on."""
    done = 0
    for low, high in place:
        if start < high - low and done < nbytes:
            count = min(high - low - start, nbytes - done)
            yield low + start, done, count
            done, start = done + count, 0
        elif start:
            start -= min(high - low, start)
    assert done == nbytes, "within its place"
