"""Copies of blocks to a device that has memory of its own: from the host's pinned memory, or from files
through pinned pieces of it, on streams of their own beside the block that computes."""

import ctypes
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from coserve.core.size import show_size
from coserve.errors import ConfigError
from coserve.streamed.files import PIECE
from coserve.streamed.stored import ALIGNED, BlockBuffer, ReadBuffer, StoredBlock

_TRIED: Final = 64 << 20  # bytes copied to learn a link's rate
_PIECES: Final = 2  # one is read into while the other is copied


class PinnedBuffer(ReadBuffer):
    """A `ReadBuffer` that a GPU copies from at its link's full rate while the host goes on. torch's own
    pinned memory comes in powers of two: a block of 630 MB would take 1 GiB."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises ConfigError where the system pins no more memory."""
        super().__init__(nbytes)
        if device.type != "cuda":
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if failed := int(runtime.cudaHostRegister(address, self.nbytes, 0)):
            raise ConfigError(
                f"engine.host_memory: {show_size(self.nbytes)} of the host's memory cannot be pinned (CUDA "
                f"error {failed}): set it lower"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


class DeviceBuffer(BlockBuffer):
    """Memory of a device. Copies into it and uses by streams of the device wait for each other by events."""

    def __init__(self, copier: "Copier", nbytes: int) -> None:
        self._copier = copier
        self.tensor = torch.empty(nbytes + ALIGNED, dtype=torch.uint8, device=copier.device)
        self._filled: Any = None  # the event behind the last copy
        self._parted: dict[Any, Any] = {}  # the event behind the last use on each stream
        self._users: set[Any] = set()  # streams that the memory's own allocator knows of
        self.part()  # what had the memory before may still be used on this stream

    def fill(self, block: StoredBlock) -> None:
        self.settle()
        self.shift = block.shift
        self._copier.copy(block, self)

    def take_over(self, tensors: Sequence[Tensor], source: ReadBuffer) -> None:
        """Has tensors be on the device, those in `source` at the same places here; all is shifted so that
        most of them are aligned, which files do not see to and products on a GPU want."""
        places = [source.offset_of(tensor) for tensor in tensors]
        found = Counter(-place % ALIGNED for place in places if place is not None)
        self.settle()
        self.shift = max(found, key=lambda shift: found[shift], default=0)
        _copy(source.tensor, self, 0)
        for tensor, place in zip(tensors, places, strict=True):
            if place is None:
                tensor.data = tensor.data.to(self.tensor.device)
            else:
                begin = self.shift + place
                own = self.tensor[begin : begin + tensor.nbytes]
                tensor.data = own.view(tensor.dtype).view(tensor.shape)

    def empty(self) -> None:
        self.settle()
        self.join()
        super().empty()
        self.filled(self._copier.current())
        self.part()

    def settle(self) -> None:
        parted, self._parted = self._parted, {}
        for event in parted.values():
            event.synchronize()

    def filled(self, stream: Any) -> None:
        """Notes that all of it has been launched on a stream."""
        if stream is not None:
            self._note(stream)
            self._filled = _mark(stream)

    def wait(self) -> None:
        """Waits until all of it is there."""
        if self._filled is not None:
            self._filled.synchronize()

    def join(self) -> None:
        if self._filled is not None:
            self._copier.current().wait_event(self._filled)

    def part(self) -> None:
        if (stream := self._copier.current()) is not None:
            self._note(stream)
            self._parted[stream] = _mark(stream)

    def _note(self, stream: Any) -> None:
        if stream not in self._users:  # else its memory may be another's while the stream uses it
            self._users.add(stream)
            self.tensor.record_stream(stream)


class _Lane:
    """One thread's way to a device: a stream, and pieces of pinned memory, each with the event behind its
    last copy."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.pieces = [PinnedBuffer(PIECE, device) for _ in range(_PIECES)]
        self.copied: list[Any] = [None] * _PIECES


class Copier:
    """Copies blocks to a device. On a GPU each thread that copies has a stream of its own, and waits until
    its copies are there: whoever waits for the thread may be patient, count the seconds, and see what failed.
    Where the device has no streams copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own = threading.local()

    def buffer(self, nbytes: int) -> DeviceBuffer:
        """Memory of the device."""
        return DeviceBuffer(self, nbytes)

    def current(self) -> Any:
        """The stream that the caller launches on; None where there are none."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def copy(self, block: StoredBlock, to: DeviceBuffer) -> None:
        """Fills a buffer that nothing uses. Raises WeightsUnreadable, and the device's errors."""
        lane = self._lane()
        with torch.cuda.stream(lane.stream):  # does nothing without one
            try:
                if block.held is not None:
                    _copy(block.held.tensor[: block.nbytes], to, 0)
                else:
                    self._pass(block, to, lane)
            finally:
                # A copy that goes on would write over what another thread's stream brings next.
                to.filled(lane.stream)
                to.wait()

    def rate(self) -> float:
        """Bytes a second of copies from pinned memory, by a trial."""
        source, to = PinnedBuffer(_TRIED, self.device), self.buffer(_TRIED)
        rates = []
        for _ in range(3):  # the first one touches the pages
            began = time.perf_counter()
            _copy(source.tensor, to, 0)
            to.filled(self.current())
            to.wait()
            rates.append(_TRIED / (time.perf_counter() - began))
        return max(rates)

    def _pass(self, block: StoredBlock, to: DeviceBuffer, lane: _Lane) -> None:
        """Copies a block from its files, piece by piece."""
        turn = 0
        for read in block.reads:
            for done in range(0, read.end - read.into, PIECE):
                piece, count = lane.pieces[turn], min(read.end - read.into - done, PIECE)
                if lane.copied[turn] is not None:
                    lane.copied[turn].synchronize()
                read.file.read(read.start + done, piece.bytes[:count])
                _copy(piece.tensor[:count], to, read.into + done)
                if lane.stream is not None:
                    lane.copied[turn] = _mark(lane.stream)
                turn = (turn + 1) % _PIECES

    def _lane(self) -> _Lane:
        if not hasattr(self._own, "lane"):
            self._own.lane = _Lane(self.device)
        lane: _Lane = self._own.lane
        return lane


def copier_for(device: torch.device) -> Copier | None:
    """A copier for a device; None for a processor, which computes where files are read to."""
    return None if device.type == "cpu" else Copier(device)


def _copy(source: Tensor, to: DeviceBuffer, place: int) -> None:
    place += to.shift
    to.tensor[place : place + len(source)].copy_(source, non_blocking=True)


def _mark(stream: Any) -> Any:
    """An event behind all that a stream was given; who waits for it leaves the processor to others."""
    return stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
