"""The page store: a worker's slower memory, for what does not lie on its device. Pages of preempted sequences
and of prefixes, and keys and values of offloaded sequences are in it, each under a name of its own."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from coserve.core.size import show_size
from coserve.errors import ConfigError, WeightsUnreadable
from coserve.memory.exhausted import is_out_of_memory
from coserve.streamed.files import PAGE, PIECE
from coserve.streamed.free_ranges import Range
from coserve.streamed.scratch import ScratchFile, memory_of
from coserve.streamed.stored import ReadBuffer

WORD: Final = 8  # bytes; rows are whole words

Entry = TypeVar("Entry")


class PageStore(ABC, Generic[Entry]):
    """Room for `nbytes` in slower memory, of which `used` are taken. A name has rows of bytes, all of one
    width: pages, tokens of one layer, or a whole state as one row.

    Threads may move rows of different names at once, and none waits for another's rows. All methods raise
    CoserveError or OSError, as disks fail.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.used = nbytes, 0
        self._lock = threading.Lock()  # of the names
        self._entries: dict[Hashable, tuple[Entry, int]] = {}  # with their bytes

    def __contains__(self, name: Hashable) -> bool:
        return name in self._entries

    def make(self, name: Hashable, rows: int, width: int) -> None:
        """Takes room for so many rows of `width` bytes, which are not written yet."""
        assert name not in self._entries and width % WORD == 0, "a name is used once, for whole words"
        nbytes = -(-rows * width // PAGE) * PAGE
        with self._lock:
            if nbytes > self.nbytes - self.used:
                raise ConfigError(f"{show_size(nbytes)} are more than is free of {show_size(self.nbytes)}")
            self.used += nbytes
        try:
            entry = self._allocate(rows, width)  # may take long, where a disk does
        except BaseException:
            with self._lock:
                self.used -= nbytes
            raise
        self._entries[name] = entry, nbytes

    def put(self, name: Hashable, first: int, rows: Tensor) -> None:
        """Writes contiguous rows [n, width] of bytes from row `first` on."""
        self._write(self._entries[name][0], first, rows)

    def get(self, name: Hashable, first: int, count: int) -> Tensor:
        """Rows [count, width] from row `first` on, on the device; valid until the thread's next call."""
        return self._read(self._entries[name][0], first, count)

    def drop(self, name: Hashable) -> None:
        """Frees what a name has, if it has anything."""
        with self._lock:
            if (found := self._entries.pop(name, None)) is not None:
                entry, nbytes = found
                self._free(entry)
                self.used -= nbytes

    @abstractmethod
    def _allocate(self, rows: int, width: int) -> Entry: ...

    @abstractmethod
    def _write(self, entry: Entry, first: int, rows: Tensor) -> None: ...

    @abstractmethod
    def _read(self, entry: Entry, first: int, count: int) -> Tensor: ...

    def _free(self, entry: Entry) -> None:
        """Gives an entry's memory back."""


def open_store(device: torch.device, folder: str, nbytes: int) -> PageStore[Any]:
    """A file in `folder` beside a CPU, the host's memory beside a GPU. Raises ConfigError for a folder that
    can hold nothing."""
    return ScratchStore(folder, nbytes) if device.type == "cpu" else HostStore(device, nbytes)


@dataclass(frozen=True, slots=True)
class _FileRows:
    """Rows of `width` bytes in ranges of a file, one behind the other, and their checksums [rows]."""

    width: int
    ranges: Sequence[Range]
    sums: Tensor

    def pieces(self, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(place in the file, first byte, bytes) of the parts of `nbytes` from byte `start` on."""
        done = 0
        for low, high in self.ranges:
            if start < high - low and done < nbytes:
                count = min(high - low - start, nbytes - done)
                yield low + start, done, count
                done, start = done + count, 0
            elif start:
                start -= min(high - low, start)
        assert done == nbytes, "within its rows"


class ScratchStore(PageStore[_FileRows]):
    """A scratch file, with a checksum of each row: what a disk says it has written may not be what it reads.

    The sums are of 8-byte words times odd numbers, modulo 2**64: one wrong word is always noticed, and others
    with a chance of all but 2**-63. 6.7 GiB/s on one core; zlib's CRC-32 takes 1.2.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        super().__init__(nbytes)
        self._file = ScratchFile(folder, "keys and values", nbytes)
        self._own = threading.local()  # each thread's buffer
        self._factors: dict[int, Tensor] = {}  # by the words of a row

    def _allocate(self, rows: int, width: int) -> _FileRows:
        return _FileRows(width, self._file.take(rows * width), torch.zeros(rows, dtype=torch.long))

    def _write(self, entry: _FileRows, first: int, rows: Tensor) -> None:
        entry.sums[first : first + len(rows)] = self._sums(rows)
        memory = memory_of(rows)
        for place, begin, count in entry.pieces(first * entry.width, rows.nbytes):
            self._file.put(place, memory[begin : begin + count])

    def _read(self, entry: _FileRows, first: int, count: int) -> Tensor:
        """Raises WeightsUnreadable where the bytes are not those that were written."""
        start, nbytes = first * entry.width, count * entry.width
        skipped = start % PAGE  # reads are of whole pages of the file
        whole = -(-(skipped + nbytes) // PAGE) * PAGE
        buffer: ReadBuffer | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer.bytes) < whole:
            buffer = self._own.buffer = ReadBuffer(max(whole, PIECE + 2 * PAGE))
        for place, begin, length in entry.pieces(start - skipped, whole):
            self._file.file.read(place, buffer.bytes[begin : begin + length])
        rows = buffer.tensor[skipped : skipped + nbytes].view(count, -1)
        if not torch.equal(self._sums(rows), entry.sums[first : first + count]):
            raise WeightsUnreadable("the scratch file does not have what was written")
        return rows

    def _free(self, entry: _FileRows) -> None:
        self._file.free(entry.ranges)

    def _sums(self, rows: Tensor) -> Tensor:
        words = rows.shape[1] // WORD
        if words not in self._factors:
            drawn = torch.randint(-(2**62), 2**62, (words,), generator=torch.Generator().manual_seed(0))
            self._factors[words] = drawn * 2 + 1
        return torch.mv(rows.view(torch.long), self._factors[words])


class HostStore(PageStore[Tensor]):
    """The host's memory, pinned beside a GPU for faster transfers."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(nbytes)
        self._device = device

    def _allocate(self, rows: int, width: int) -> Tensor:
        try:
            return torch.empty(rows, width, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(f"the host's memory has no room for {rows * width} bytes: {error}") from error

    def _write(self, entry: Tensor, first: int, rows: Tensor) -> None:
        entry[first : first + len(rows)].copy_(rows, non_blocking=True)

    def _read(self, entry: Tensor, first: int, count: int) -> Tensor:
        return entry[first : first + count].to(self._device, non_blocking=True)
