"""Reads weights from files: safetensors headers, and bytes into memory without a copy in the page cache."""

import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from coserve.errors import ModelError, WeightsUnreadable

PAGE: Final = 4096  # bytes: alignment of offsets, lengths and addresses in direct reads
PIECE: Final = 4 << 20  # bytes of one read: of 1, 4, 16 and 64 MiB the fastest in either mode
_TIMED: Final = 64 << 20  # bytes read to choose a mode
_BETTER: Final = 1.1  # by how much a buffered read has to be faster: it takes four times the processor's time
_LONGEST_HEADER: Final = 100 << 20  # bytes, as safetensors has it

DTYPES: Final = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Mode(Enum):
    """Way in which bytes are read. Either leaves nothing in the page cache, where a model larger than memory
    would displace all else and be displaced itself before it is read again. DIRECT is O_DIRECT. BUFFERED
    reads through the page cache and drops each piece at once: the system reads ahead, which on a virtual disk
    may be faster (1.3 to 1.5 GB/s against 0.7 to 0.8), and copies (0.4 of a core against 0.1)."""

    DIRECT = "direct"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: its bytes are `[start, start + nbytes)`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _FileState:
    """Signs that a file may have changed."""

    inode: int
    size: int
    modified: int
    changed: int  # which no process can set, as it can the time before


class _Descriptor:
    """An open file, closed when the last reader lets go of it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)

    @property
    def state(self) -> _FileState:
        found = os.fstat(self.number)
        return _FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class WeightFile:
    """A file whose bytes are read again and again, while others may replace, truncate or delete it.

    It stays open, so that a file which is deleted or replaced is still there. Of one that was changed in
    place each read is trusted only with the checksum that it had at first. After an error the file is opened
    by its name again.

    The checksum is CRC-32: any change within four bytes is seen, and of others all but one in 2^32. It reads
    1.8 GB/s on one core, as much as a disk or twice as much, so files whose state is that of the last check
    are not checked again: an open file's state is asked for before and after each read, in 2 us.
    """

    def __init__(self, path: Path | None, descriptor: int = -1) -> None:
        """A file without a name is given as a descriptor, which it then owns. Raises WeightsUnreadable."""
        self.path, self.mode = path, Mode.BUFFERED
        self._lock = threading.Lock()
        self._descriptors: dict[Mode, _Descriptor] = {}
        self._checked: dict[tuple[int, int], tuple[int, _FileState]] = {}  # CRC-32, and the state with it
        if path is None:
            self._descriptors[Mode.BUFFERED] = _Descriptor(descriptor)
        with self._failing():
            self._known = self._open(Mode.BUFFERED).state

    @property
    def disk(self) -> int:
        """Tells files of one disk from others."""
        with self._failing():
            return os.fstat(self._open(Mode.BUFFERED).number).st_dev

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return "the scratch file" if self.path is None else str(self.path)

    def read(self, start: int, into: memoryview) -> None:
        """Fills `into` from `start` on, both aligned to `PAGE`; past the end of the file it stays as it is.

        Raises WeightsUnreadable for a file that is short, changed or cannot be read. A later call may
        succeed.
        """
        with self._failing():
            before = self._open(Mode.BUFFERED).state
            self._read(start, into, self.mode)
            if self.path is not None:
                own = into[: self._known.size - start]
                self._expect_unchanged(start, own, before, self._open(Mode.BUFFERED).state)

    def grow(self, size: int) -> None:
        """Says that its owner has written more."""
        self._known = replace(self._known, size=size)

    def choose_mode(self, start: int, end: int) -> float:
        """Chooses the faster mode by reading some of these bytes; returns its bytes a second."""
        into = memoryview(mmap.mmap(-1, max(min(end - start, _TIMED) // PAGE * PAGE, PAGE)))
        rates = dict.fromkeys(Mode, 0.0)
        for mode in Mode:
            with suppress(OSError):  # no direct reads on this file system, and none on this system
                self._drop(self._open(Mode.BUFFERED), start, len(into))
                begun = time.perf_counter()
                self._read(start, into, mode)
                rates[mode] = len(into) / (time.perf_counter() - begun)
        is_faster = rates[Mode.BUFFERED] > _BETTER * rates[Mode.DIRECT]
        self.mode = Mode.BUFFERED if is_faster else Mode.DIRECT
        return rates[self.mode]

    def _read(self, start: int, into: memoryview, mode: Mode) -> None:
        file = self._open(mode)
        size, done = file.state.size, 0
        wanted = min(len(into), self._known.size - start)
        while done < wanted:
            count = os.preadv(file.number, [into[done : done + PIECE]], start + done)
            if mode is Mode.BUFFERED:
                self._drop(file, start + done, count)
            done += count
            if count == 0 or (done < wanted and done % PAGE):
                break
        if done < wanted:
            raise WeightsUnreadable(
                f"{self.name} is too short: it has {size:,} bytes of {self._known.size:,}"
            )

    def _drop(self, file: _Descriptor, start: int, nbytes: int) -> None:
        os.posix_fadvise(file.number, start, nbytes, os.POSIX_FADV_DONTNEED)

    def _open(self, mode: Mode) -> _Descriptor:
        with self._lock:
            if mode not in self._descriptors:
                own = self._descriptors.get(Mode.BUFFERED)  # both read one file, whatever its name is today
                path = self.path if own is None else f"/proc/self/fd/{own.number}"
                assert path is not None
                flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if mode is Mode.DIRECT else 0)
                self._descriptors[mode] = _Descriptor(os.open(path, flags))
            return self._descriptors[mode]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns errors of the system into WeightsUnreadable; after an error the file is opened again."""
        try:
            yield
        except (OSError, WeightsUnreadable) as error:
            if self.path is not None:
                with self._lock:
                    self._descriptors.clear()
            if isinstance(error, WeightsUnreadable):
                raise
            reason = error.strerror or str(error)
            raise WeightsUnreadable(f"weights cannot be read from {self.name}: {reason}") from error

    def _expect_unchanged(self, start: int, read: memoryview, before: _FileState, after: _FileState) -> None:
        """Raises WeightsUnreadable unless this is what was read first, given the file's state around it."""
        key = start, len(read)
        if key not in self._checked:
            if not before == after == self._known:
                raise WeightsUnreadable(f"{self.name} has changed while it was loaded")
            self._checked[key] = zlib.crc32(read), after
            return
        checksum, state = self._checked[key]
        if before == after == state:
            return
        if after.size != self._known.size or zlib.crc32(read) != checksum:
            raise WeightsUnreadable(
                f"{self.name} has changed since it was loaded, in the bytes from {start:,} to "
                f"{start + len(read):,}: put it back, or start again with the new one"
            )
        if before == after:
            self._checked[key] = checksum, after


def read_header(path: Path) -> dict[str, FileTensor]:
    """Tensors of a safetensors file, by name. Raises ModelError."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError("its header is too long")
            fields = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        fields.pop("__metadata__", None)
        found = {name: _stored(field, 8 + length) for name, field in fields.items()}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is no file of safetensors: {error}") from error
    if (end := max((tensor.start + tensor.nbytes for tensor in found.values()), default=0)) > size:
        raise ModelError(f"{path} is too short: it has {size:,} bytes of {end:,}")
    return found


def _stored(field: dict[str, object], first: int) -> FileTensor:
    dtype, shape, offsets = DTYPES.get(str(field["dtype"])), field["shape"], field["data_offsets"]
    assert isinstance(shape, list) and isinstance(offsets, list)
    if dtype is None:
        raise ValueError(f"{field['dtype']} is no type of weights")
    begin, end = map(int, offsets)
    stored = FileTensor(dtype, tuple(map(int, shape)), first + begin, end - begin)
    if stored.nbytes != torch.Size(stored.shape).numel() * dtype.itemsize:
        raise ValueError("a tensor's bytes do not fit its shape")
    return stored


def tensor_in(memory: Tensor, start: int, stored: FileTensor) -> Tensor:
    """The tensor whose bytes are in `memory` (uint8) from `start` on, whatever the alignment."""
    nbytes = memory[start : start + stored.nbytes]
    if start % stored.dtype.itemsize:
        nbytes = nbytes.clone()
    return nbytes.view(stored.dtype).view(stored.shape)


def ranges(tensors: Sequence[FileTensor], gap: int = 1 << 16) -> list[tuple[int, int]]:
    """Ranges of a file with these tensors, aligned to `PAGE`: (start, end); what is no more than `gap` apart
    is read together."""
    found: list[tuple[int, int]] = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        start, end = tensor.start // PAGE * PAGE, -(-(tensor.start + tensor.nbytes) // PAGE) * PAGE
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
