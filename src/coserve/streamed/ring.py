"""The ring: buffers through which the parameters of blocks pass, read ahead of the block that computes."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from torch import Tensor

from coserve.core.plan import WeightReads
from coserve.core.sequence import Direction
from coserve.errors import WeightsUnreadable
from coserve.model.block import Residence
from coserve.streamed.stored import BlockBuffer, ReadBuffer, StoredBlock

_SILENT: Final = "weights are being read for {:.0f} s: the disk does not answer"
PATIENCE: Final = 60.0  # seconds for bytes that are being read, at an unknown rate; then a visit fails
_LEAST: Final = 15.0  # seconds of it: a busy disk may stall for some
_TIMES: Final = 20.0  # what reading a block should take
_AGAIN: Final = 0.25  # seconds for what was waited for in vain: it is tried again and again
_BEAT: Final = 0.25  # seconds between two signs of life
Visit = tuple[int, bool]  # a block's place in the chain, and whether on the way back


class _Slot:
    """A buffer, and the block whose parameters it has or gets."""

    def __init__(self, buffer: BlockBuffer) -> None:
        self.buffer = buffer
        self.place: int | None = None
        self.read: Future[None] | None = None  # None for a slot without a block
        self.visits = 0

    @property
    def is_free(self) -> bool:
        """Tells whether another block may have the buffer: nobody visits its block or writes into it."""
        return not self.visits and (self.read is None or self.read.done() or self.read.cancel())


class Ring:
    """Buffers for streamed blocks. A thread reads the blocks that will be visited next, as far as there are
    buffers; another one reads what a visit needs and the first has not begun. A visit waits for either with
    `patience`, whatever the disk does, and is worth trying again: the bytes may still come.

    Which block comes next is learnt: it is the one that followed this one last time, in this direction. So
    passes forward and back, which turn at the last block and at the lowest one that trains, find there what
    the ring still has. Where more blocks are visited at a time than there are buffers, one is added for that
    time.
    """

    def __init__(
        self,
        blocks: Mapping[int, StoredBlock],
        buffers: int,
        make: Callable[[int], BlockBuffer] = ReadBuffer,
    ) -> None:
        """`blocks` by their places in the chain; `make` makes a buffer of so many bytes."""
        self._blocks, self._make = blocks, make
        self._nbytes = max((block.nbytes for block in blocks.values()), default=0)
        self._slots = [_Slot(make(self._nbytes)) for _ in range(buffers if blocks else 0)]
        self._buffers = len(self._slots)
        self._lock = threading.RLock()  # cancelling a read notifies
        self._freed = threading.Condition(self._lock)
        self._reader = ThreadPoolExecutor(1, "coserve-reader")
        self._urgent = ThreadPoolExecutor(1, "coserve-urgent-reader")
        self._after: dict[Visit, Visit] = {}
        self._last: dict[int, Visit] = {}  # by thread: two streams go their own ways
        self.patience = PATIENCE  # seconds
        self.on_wait: Callable[[], object] = int  # see `WeightReader`; nothing
        self._in_vain: set[Future[None]] = set()  # reads that visits have waited for, and that may go on
        self._dry = False
        self._total = WeightReads()

    @property
    def total(self) -> WeightReads:
        """See `WeightReader`."""
        return self._total

    @property
    def dry(self) -> bool:
        """See `WeightReader`."""
        return self._dry

    @dry.setter
    def dry(self, dry: bool) -> None:
        with self._lock:
            assert not any(slot.visits for slot in self._slots), "a visit goes on"
            if not self._freed.wait_for(lambda: all(slot.is_free for slot in self._slots), self.patience):
                raise WeightsUnreadable(_SILENT.format(self.patience))
            for slot in self._slots:
                slot.place = slot.read = None
                slot.buffer.empty()
            self._dry = dry

    def expect(self, rate: float) -> None:
        """Has visits be patient with a disk of so many bytes a second: a slow one is not silent."""
        self.patience = max(_LEAST, _TIMES * self._nbytes / max(rate, 1.0))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def enter(self, place: int, direction: Direction) -> None:
        """Brings a block's parameters in. Raises WeightsUnreadable."""
        visit = place, direction is Direction.BACKWARD
        began = time.perf_counter()
        with self._lock:
            self._learn(visit)
            slot = self._slot_for(place)
            slot.visits += 1
            awaited = slot.read if slot.read is not None and not slot.read.cancel() else None
            if awaited is not None:
                self._read_ahead(visit)
        try:
            if not self._dry and (awaited is None or not self._arrives(awaited)):
                self._read_now(slot)
            self._count(waited=time.perf_counter() - began)
            self._blocks[place].bind(slot.buffer)
            with self._lock:
                self._read_ahead(visit)  # not beside what is waited for
        except BaseException:
            self._leave(slot)
            raise

    def visited(self, place: int) -> BlockBuffer:
        """The buffer of a block that is visited."""
        return self._visited(place).buffer

    def leave(self, place: int) -> None:
        """Takes a block's parameters away."""
        self._blocks[place].release()
        self._leave(self._visited(place))

    def _visited(self, place: int) -> _Slot:
        with self._lock:
            return next(slot for slot in self._slots if slot.place == place)

    def _leave(self, slot: _Slot) -> None:
        with self._lock:
            slot.visits -= 1
            if not slot.visits and len(self._slots) > self._buffers:
                self._slots.remove(slot)
                for block in self._blocks.values():
                    block.forget(slot.buffer)
            self._freed.notify_all()
            if (last := self._last.get(threading.get_ident())) is not None:
                self._read_ahead(last)

    def _learn(self, visit: Visit) -> None:
        thread = threading.get_ident()
        if thread in self._last:
            self._after[self._last[thread]] = visit
        self._last[thread] = visit

    def _coming(self, visit: Visit) -> Iterator[int]:
        """Places of the blocks that will be visited after this one."""
        for _ in range(2 * len(self._blocks)):
            visit = self._after.get(visit) or self._next(visit)
            yield visit[0]

    def _next(self, visit: Visit) -> Visit:
        """The block that follows where no pass is known yet: the next one in this direction, then a pass
        forward."""
        place, is_back = visit
        above, below = (p for p in self._blocks if p > place), (p for p in self._blocks if p < place)
        found = max(below, default=None) if is_back else min(above, default=None)
        return (min(self._blocks), False) if found is None else (found, is_back)

    def _slot_for(self, place: int) -> _Slot:
        """The slot that has this block or is getting it; else a free one, for the caller to fill."""
        for slot in self._slots:
            if slot.place == place:
                if slot.read is not None and slot.read.done() and not _is_good(slot.read):
                    slot.read = None  # perhaps the file is there again
                return slot
        if all(slot.visits for slot in self._slots):
            # The proof of training visits a layer of each kind at a time, and would wait for itself.
            self._slots.append(_Slot(self._make(self._nbytes)))
        until = time.monotonic() + self._patience_now
        while (found := self._freed.wait_for(self._least_wanted, _BEAT)) is None:
            self.on_wait()
            if time.monotonic() >= until:
                self._in_vain.update(slot.read for slot in self._slots if slot.read is not None)
                raise WeightsUnreadable(f"no buffer for weights became free in {self.patience:.0f} s")
        found.place, found.read = place, None
        return found

    def _least_wanted(self) -> _Slot | None:
        """The free slot whose block is visited last from now on."""
        coming = [*self._coming(self._last[threading.get_ident()])]
        soon: dict[int | None, int] = {place: -coming.index(place) for place in {*coming}}
        slots = sorted(self._slots, key=lambda slot: soon.get(slot.place, -len(coming)))
        return next((slot for slot in slots if slot.is_free), None)

    def _read_ahead(self, visit: Visit) -> None:
        """Has the thread read blocks that come next into slots of blocks that do not."""
        if self._dry:
            return
        pinned = sum(slot.visits > 0 for slot in self._slots)
        wanted = [*dict.fromkeys(place for place in self._coming(visit))][: len(self._slots) - pinned]
        for place in wanted:
            if any(slot.place == place for slot in self._slots):
                continue
            slot = next((s for s in self._slots if s.place not in wanted and s.is_free), None)
            if slot is None:
                return
            slot.place = place
            try:
                slot.read = self._reader.submit(self._fill, slot, place)
            except RuntimeError:  # the interpreter ends
                slot.place = slot.read = None
                return
            slot.read.add_done_callback(self._notify)

    def _fill(self, slot: _Slot, place: int) -> None:
        slot.buffer.settle()  # which is no time of reading
        began = time.perf_counter()
        slot.buffer.fill(self._blocks[place])
        self._count(self._blocks[place].read_nbytes, time.perf_counter() - began)

    def _count(self, nbytes: int = 0, seconds: float = 0.0, waited: float = 0.0) -> None:
        with self._lock:
            now = self._total
            self._total = WeightReads(now.nbytes + nbytes, now.seconds + seconds, now.waited + waited)

    def _read_now(self, slot: _Slot) -> None:
        """Has a slot's block read at once. Raises WeightsUnreadable."""
        place = slot.place
        assert place is not None
        with self._lock:
            try:
                slot.read = read = self._urgent.submit(self._fill, slot, place)
            except RuntimeError:  # the interpreter ends
                slot.read = read = _run(lambda: self._fill(slot, place))
        read.add_done_callback(self._notify)
        self._wait(read)
        read.result()

    def _arrives(self, read: "Future[None]") -> bool:
        """Waits for a read; False if it failed and is worth another try."""
        self._wait(read)
        return _is_good(read)

    def _wait(self, read: "Future[None]") -> None:
        """Waits until a read is over. Raises WeightsUnreadable if it takes too long."""
        until = time.monotonic() + self._patience_now
        while not wait((read,), min(_BEAT, self.patience)).done:
            self.on_wait()
            if time.monotonic() >= until:
                with self._lock:
                    self._in_vain.add(read)
                raise WeightsUnreadable(_SILENT.format(self.patience))

    @property
    def _patience_now(self) -> float:
        """Seconds for a read: few are left while one that was waited for in vain goes on."""
        with self._lock:
            self._in_vain = {read for read in self._in_vain if not read.done()}
            return min(_AGAIN, self.patience) if self._in_vain else self.patience

    def _notify(self, _: object) -> None:
        with self._lock:
            self._freed.notify_all()


def _run(work: Callable[[], None]) -> "Future[None]":
    """Runs work on this thread."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()
    try:
        work()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)
    return done


def _is_good(read: "Future[None]") -> bool:
    return not read.cancelled() and read.exception() is None


class Streamed(Residence):
    """`Residence` of a block whose parameters pass through a ring."""

    def __init__(self, ring: Ring, place: int) -> None:
        self._ring, self._place = ring, place

    def enter(self, direction: Direction) -> None:
        self._ring.enter(self._place, direction)

    def join(self) -> None:
        self._ring.visited(self._place).join()

    def part(self) -> None:
        self._ring.visited(self._place).part()

    def leave(self) -> None:
        self._ring.leave(self._place)

    def outside(self, tensor: Tensor) -> Tensor:
        return tensor.clone()
