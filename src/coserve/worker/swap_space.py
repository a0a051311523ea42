"""The second tier of pages: copies of preempted sequences' keys and values, read instead of computed again.
Beside a CPU it is a scratch file, beside a GPU pinned memory of the host."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend
from coserve.config import EngineConfig
from coserve.core.plan import BasePlan
from coserve.errors import CoserveError, WeightsUnreadable
from coserve.memory.exhausted import is_out_of_memory
from coserve.streamed.files import PAGE, PIECE
from coserve.streamed.free_ranges import Range
from coserve.streamed.scratch import ScratchFile
from coserve.streamed.stored import ReadBuffer

_ON_DEVICE: Final = 64 << 20  # bytes of a GPU's memory through which copies pass

_log = logging.getLogger(__name__)


class PageTier(Protocol):
    """A place for copies of pages. All methods raise CoserveError or OSError, as disks fail."""

    def write(self, pages: Sequence[int]) -> Any:
        """Copies pages; returns what finds them again."""
        ...

    def read(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Fills pages with those of a copy from its `first` on."""
        ...

    def free(self, copy: Any) -> None:
        """Drops a copy."""
        ...


class SwapSpace:
    """Copies by their numbers, moved as plans say. `pages` is how many it has room for.

    A copy that cannot be written or read is dropped and reported, and the first of these failures is logged:
    what it held can be computed again.
    """

    def __init__(self, backend: AttentionBackend[Any], config: EngineConfig, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, Any] = {}
        self._warned = False
        pages = config.swap_nbytes // _stride(backend)
        self._tier = self._open(backend, config.scratch, pages) if pages else None
        self.pages = 0 if self._tier is None else pages

    def _open(self, backend: AttentionBackend[Any], folder: str, pages: int) -> PageTier | None:
        if self._device.type != "cpu":
            return HostTier(backend, self._device)
        try:
            return FileTier(backend, folder, pages)
        except CoserveError as error:
            self._warn(error)
            return None

    def run(self, plan: BasePlan) -> tuple[tuple[int, ...], tuple[float, float]]:
        """Moves the pages of a plan; returns the copies that failed, and the seconds of writing and of
        reading."""
        if self._tier is None or not (plan.swap_out or plan.swap_in or plan.swap_dropped):
            return (), (0.0, 0.0)
        return self._move(plan, self._tier)

    def _move(self, plan: BasePlan, tier: PageTier) -> tuple[tuple[int, ...], tuple[float, float]]:
        failed: list[int] = []
        for number in plan.swap_dropped:
            self._drop(number, tier)
        started = self._now()
        for out in plan.swap_out:
            try:
                self._copies[out.copy] = tier.write(out.pages)
            except (CoserveError, OSError, RuntimeError) as error:
                self._fail(error)
                failed.append(out.copy)
        written = self._now()
        for back in plan.swap_in:
            if back.copy not in self._copies:  # it could not be written
                failed.append(back.copy)
                continue
            try:
                tier.read(self._copies[back.copy], back.first, back.pages)
            except (CoserveError, OSError) as error:
                self._fail(error)
                failed.append(back.copy)
            self._drop(back.copy, tier)
        return tuple(failed), (written - started, self._now() - written)

    def _drop(self, number: int, tier: PageTier) -> None:
        if (copy := self._copies.pop(number, None)) is not None:
            tier.free(copy)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise error
        self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            _log.warning("preempted sequences are computed again, as pages cannot be swapped: %s", error)
        self._warned = True

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class FileCopy:
    """Pages in ranges of a file, in order, and their checksums [pages]."""

    ranges: Sequence[Range]
    sums: Tensor


class FileTier:
    """Copies in a scratch file, with checksums: what a disk says it has written may not be what it reads.

    The sums are of 8-byte words times odd numbers, modulo 2**64: one wrong word is always noticed, and others
    with a chance of all but 2**-63. 6.7 GiB/s on one core; zlib's CRC-32 takes 1.2.
    """

    def __init__(self, backend: AttentionBackend[Any], folder: str, pages: int) -> None:
        """Raises ConfigError for a folder that can hold nothing."""
        self._backend, self._stride = backend, _stride(backend)
        self._file = ScratchFile(folder, "pages of preempted sequences", pages * self._stride)
        self._most = max(PIECE // self._stride, 1)  # pages written or read at once
        self._buffer: ReadBuffer | None = None
        words = torch.Generator().manual_seed(0)
        size = (self._stride // 8,)
        self._factors = torch.randint(-(2**62), 2**62, size, generator=words) * 2 + 1

    def write(self, pages: Sequence[int]) -> FileCopy:
        """See `PageTier`."""
        copy = FileCopy(self._file.take(len(pages) * self._stride), torch.empty(len(pages), dtype=torch.long))
        try:
            for start, first, count in self._runs(copy):
                rows, data = self._rows(count)
                self._backend.read_pages(pages[first : first + count], rows[:, : self._backend.page_nbytes])
                copy.sums[first : first + count] = self._sums(rows)
                self._file.put(start, data)
        except BaseException:
            self.free(copy)
            raise
        return copy

    def read(self, copy: FileCopy, first: int, pages: Sequence[int]) -> None:
        """See `PageTier`. Raises WeightsUnreadable where the bytes are not those that were written."""
        for start, place, count in self._runs(copy):
            skipped = max(first - place, 0)
            if skipped >= count:
                continue
            start, place, count = start + skipped * self._stride, place + skipped, count - skipped
            rows, data = self._rows(count)
            self._file.file.read(start, data)
            if not torch.equal(self._sums(rows), copy.sums[place : place + count]):
                raise WeightsUnreadable("the scratch file does not have what was written")
            targets = pages[place - first : place - first + count]
            self._backend.write_pages(targets, rows[:, : self._backend.page_nbytes])

    def free(self, copy: FileCopy) -> None:
        """See `PageTier`."""
        self._file.free(copy.ranges)

    def _runs(self, copy: FileCopy) -> Iterator[tuple[int, int, int]]:
        """(place in the file, first page, pages) of each piece of a copy."""
        first = 0
        for start, end in copy.ranges:
            while start < end:
                count = min((end - start) // self._stride, self._most)
                yield start, first, count
                start, first = start + count * self._stride, first + count

    def _rows(self, count: int) -> tuple[Tensor, memoryview]:
        """A buffer of bytes [count, stride], and its memory."""
        if self._buffer is None:
            self._buffer = ReadBuffer(self._most * self._stride)
        nbytes = count * self._stride
        return self._buffer.tensor[:nbytes].view(count, -1), self._buffer.bytes[:nbytes]

    def _sums(self, rows: Tensor) -> Tensor:
        return torch.mv(rows.view(torch.long), self._factors)


class HostTier:
    """Copies in the host's memory, pinned beside a GPU for faster transfers."""

    def __init__(self, backend: AttentionBackend[Any], device: torch.device) -> None:
        self._backend, self._device = backend, device

    def write(self, pages: Sequence[int]) -> Tensor:
        """See `PageTier`."""
        pinned = self._device.type == "cuda"
        copy = torch.empty(len(pages), self._backend.page_nbytes, dtype=torch.uint8, pin_memory=pinned)
        for part, place in self._pieces(pages, copy):
            passing = torch.empty_like(place, device=self._device)
            self._backend.read_pages(part, passing)
            place.copy_(passing, non_blocking=True)
        return copy

    def read(self, copy: Tensor, first: int, pages: Sequence[int]) -> None:
        """See `PageTier`."""
        for part, place in self._pieces(pages, copy[first : first + len(pages)]):
            self._backend.write_pages(part, place.to(self._device, non_blocking=True))

    def free(self, copy: Tensor) -> None:
        """See `PageTier`. The memory stays until transfers under way are done."""

    def _pieces(self, pages: Sequence[int], copy: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
        most = max(_ON_DEVICE // self._backend.page_nbytes, 1)
        for start in range(0, len(pages), most):
            yield pages[start : start + most], copy[start : start + most]


def _stride(backend: AttentionBackend[Any]) -> int:
    """Bytes between two pages of a copy."""
    return -(-backend.page_nbytes // PAGE) * PAGE
