"""The ring of buffers: what is read ahead, what is found there, and what happens when reading fails."""

import random
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch import nn

from coserve.core.sequence import Direction
from coserve.errors import WeightsUnreadable
from coserve.model.block import Block
from coserve.streamed.ring import Ring
from coserve.streamed.stored import ReadBuffer, StoredBlock

FORWARD, BACK = Direction.INFER, Direction.BACKWARD


class Noted(StoredBlock):
    """A block whose reads and bindings are noted; a read takes `seconds`, and may fail."""

    def __init__(self, place: int, notes: list[tuple[str, int]]) -> None:
        super().__init__(Block(f"layers.{place}", nn.Identity()), [], [])
        self.place, self.notes = place, notes
        self.nbytes, self.seconds = 4096, 0.0
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def read(self, buffer: ReadBuffer) -> None:
        self.gate.wait()
        time.sleep(self.seconds)
        self.notes.append(("read", self.place))
        if self.failure is not None:
            raise self.failure
        buffer.bytes[0] = self.place

    def bind(self, buffer: ReadBuffer) -> None:
        assert buffer.bytes[0] == self.place, "the buffer has another block"
        self.notes.append(("bind", self.place))

    def release(self) -> None:
        pass


def make(places: Iterable[int], buffers: int = 2) -> tuple[Ring, dict[int, Noted], list[tuple[str, int]]]:
    notes: list[tuple[str, int]] = []
    blocks = {place: Noted(place, notes) for place in places}
    return Ring(blocks, buffers), blocks, notes


def settle(ring: Ring) -> None:
    """Waits for what is being read ahead."""
    ring._reader.submit(lambda: None).result(5)


def visit(ring: Ring, place: int, direction: Direction = FORWARD) -> None:
    ring.enter(place, direction)
    ring.leave(place)
    settle(ring)


def reads(notes: list[tuple[str, int]]) -> list[int]:
    return [place for kind, place in notes if kind == "read"]


def test_the_next_block_is_read_while_one_is_visited() -> None:
    ring, _, notes = make([1, 4, 6, 9])
    ring.enter(1, FORWARD)
    settle(ring)
    assert notes == [("read", 1), ("bind", 1), ("read", 4)]
    ring.leave(1)
    settle(ring)
    assert reads(notes) == [1, 4, 6]


def test_a_pass_reads_each_block_once() -> None:
    ring, _, notes = make(range(6))
    for _ in range(4):
        for place in range(6):
            visit(ring, place)
    assert reads(notes)[:24] == [*range(6)] * 4
    assert len(reads(notes)) <= 24 + 2  # the next pass has begun


@pytest.mark.parametrize("buffers", [2, 3, 5])
def test_a_pass_back_finds_what_the_pass_forward_left(buffers: int) -> None:
    """Once it is known that passes turn: at the top, and at the lowest block that trains."""
    ring, _, notes = make(range(8), buffers)
    for cycle in range(6):
        before = len(reads(notes))
        for place in range(8):
            visit(ring, place)
        for place in reversed(range(2, 8)):
            visit(ring, place, BACK)
        if cycle > 1:
            assert len(reads(notes)) - before <= 8 + 6 - buffers


@pytest.mark.parametrize("seed", range(8))
def test_a_block_that_nobody_expects_takes_no_buffer_from_those_that_come_next(seed: int) -> None:
    """Passes repeat, with some jumps. Each visit follows the one that followed the same block last time, so
    the blocks that come next are known: none of those in a buffer is read again."""
    draw = random.Random(seed)
    count, buffers = draw.randint(5, 9), draw.randint(3, 4)
    ring, _, notes = make(range(count), buffers)
    after = dict[int, int]()
    last, kept = count - 1, 0
    for number in range(80):
        place = (last + 1) % count
        if number > 2 * count and draw.random() < 0.4:
            place = (last + draw.randint(-3, 2)) % count
        if number:
            after[last] = place
        last, coming = place, list[int]()
        while len(coming) < 2 * count:
            coming.append(after.get(coming[-1] if coming else place, 0))
        held, before = {slot.place for slot in ring._slots}, len(reads(notes))
        ring.enter(place, FORWARD)
        settle(ring)
        if number > count:
            soon = [*dict.fromkeys(coming)][: buffers - 1]
            assert reads(notes)[before:] == [one for one in dict.fromkeys([place, *soon]) if one not in held]
            kept += place not in held and not held.isdisjoint(soon)
        ring.leave(place)
        settle(ring)
    assert kept > 2, "some blocks come unexpectedly while others that come next are there"


@pytest.mark.parametrize("seed", range(10))
def test_any_order_gets_its_own_blocks(seed: int) -> None:
    draws = random.Random(seed)
    ring, blocks, _ = make(range(draws.randint(1, 6)), draws.randint(2, 4))
    for block in blocks.values():
        block.seconds = draws.choice([0.0, 0.0005])
    for _ in range(60):
        ring.enter(place := draws.randrange(len(blocks)), draws.choice([FORWARD, BACK]))
        ring.leave(place)


def test_two_threads_visit_different_blocks() -> None:
    ring, _, _ = make(range(5), 2)

    def go(seed: int) -> None:
        places = [place for place in range(5) if place % 2 == seed]
        for n in range(200):
            ring.enter(places[n % len(places)], FORWARD)
            ring.leave(places[n % len(places)])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(go, seed) for seed in range(2)]:
            done.result(20)


def test_a_failed_read_is_raised_at_the_visit_and_tried_again_at_the_next() -> None:
    ring, blocks, notes = make(range(3))
    blocks[1].failure = WeightsUnreadable("gone")
    visit(ring, 0)
    for _ in range(3):
        with pytest.raises(WeightsUnreadable, match="gone"):
            ring.enter(1, FORWARD)
    visit(ring, 2)
    blocks[1].failure = None
    visit(ring, 1)
    assert ("bind", 1) in notes and not any(slot.visits for slot in ring._slots)


def test_other_errors_are_raised_too() -> None:
    ring, blocks, _ = make(range(2))
    blocks[1].failure = ValueError("a bug")
    visit(ring, 0)
    with pytest.raises(ValueError, match="a bug"):
        ring.enter(1, FORWARD)
    blocks[1].failure = None
    visit(ring, 1)


def test_a_reader_that_never_begins_stops_no_visit() -> None:
    ring, _, notes = make(range(4))
    gate = threading.Event()
    ring._reader.submit(gate.wait)  # the thread hangs
    try:
        for place in range(4):
            ring.enter(place, FORWARD)
            ring.leave(place)
        assert {*reads(notes)} == {*range(4)}
    finally:
        gate.set()


def test_a_reader_that_has_ended_stops_no_visit() -> None:
    ring, _, notes = make(range(4))
    ring._reader.shutdown()
    for place in range(4):
        ring.enter(place, FORWARD)
        ring.leave(place)
    assert reads(notes) == [*range(4)]


def test_a_read_that_does_not_end_fails_the_visit() -> None:
    ring, blocks, _ = make(range(3))
    blocks[1].gate.clear()
    ring.patience = 0.05
    ring.enter(0, FORWARD)
    while not isinstance(ring._slots[1].read, Future) or not ring._slots[1].read.running():
        time.sleep(0.001)
    ring.leave(0)
    with pytest.raises(WeightsUnreadable, match="the disk does not answer"):
        ring.enter(1, FORWARD)
    blocks[1].gate.set()
    ring.patience = 5.0
    visit(ring, 1)


def test_a_disk_that_hangs_while_a_visit_reads_for_itself_fails_the_visit_until_it_answers() -> None:
    ring, blocks, notes = make(range(3))
    blocks[0].gate.clear()
    ring.patience, beats = 0.05, 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    ring.on_wait = beat
    with pytest.raises(WeightsUnreadable, match="the disk does not answer"):
        ring.enter(0, FORWARD)
    settle(ring)
    assert 1 in reads(notes), "the other thread reads meanwhile, which does not give the patience back"
    ring.patience = 10.0  # of which nothing is left for what was waited for in vain
    for _ in range(2):
        with pytest.raises(WeightsUnreadable, match="the disk does not answer"):
            ring.enter(0, FORWARD)
    assert beats >= 3, "whoever waits gives signs of life"
    assert beats <= 12, "four a second, of half a second in all"
    blocks[0].gate.set()
    ring.enter(0, FORWARD)
    assert reads(notes).count(0) == 1, "nothing is read twice"
    assert ring._patience_now == 10.0


def test_visits_go_on_while_the_thread_that_reads_ahead_hangs() -> None:
    ring, blocks, _ = make(range(4), buffers=3)
    blocks[1].gate.clear()
    ring.enter(0, FORWARD)
    while not isinstance(ring._slots[1].read, Future) or not ring._slots[1].read.running():
        time.sleep(0.001)
    ring.leave(0)
    for place in (2, 3, 2):  # the other thread reads what the first has not begun
        ring.enter(place, FORWARD)
        ring.leave(place)
    blocks[1].gate.set()
    visit(ring, 1)


@pytest.mark.parametrize(("rate", "patience"), [(1e9, 15.0), (4096.0, 20.0), (0.0, 20.0 * 4096)])
def test_patience_is_that_of_the_disk(rate: float, patience: float) -> None:
    ring, _, _ = make(range(2))
    ring.expect(rate)
    assert ring.patience == patience


def test_more_visits_than_buffers_get_one_more() -> None:
    """Else a thread that visits three blocks would wait for itself."""
    ring, _, notes = make(range(4))
    before = ring.nbytes
    for place in range(3):
        ring.enter(place, FORWARD)
    assert ring.nbytes == before * 3 // 2 and [p for kind, p in notes if kind == "bind"] == [0, 1, 2]
    for place in (1, 0, 2):
        ring.leave(place)
    assert ring.nbytes == before
    visit(ring, 3)


def test_a_buffer_that_is_there_for_some_time_goes() -> None:
    blocks = dict[int, StoredBlock]()
    for place in range(3):
        layer = nn.Linear(4, 4, bias=False)
        blocks[place] = StoredBlock(Block(f"layers.{place}", layer), [], [(layer.weight, 0)])
    ring = Ring(blocks, 2)
    for place in range(3):
        ring.enter(place, FORWARD)
    left = weakref.ref(ring.visited(0))
    for place in range(3):
        ring.leave(place)
    settle(ring)
    assert left() is None and len(ring._slots) == 2


def test_visitors_wait_for_a_buffer_that_is_being_filled() -> None:
    ring, blocks, _ = make(range(4))
    blocks[1].gate.clear()
    ring.enter(0, FORWARD)
    while not isinstance(ring._slots[1].read, Future) or not ring._slots[1].read.running():
        time.sleep(0.001)
    for ring.patience in (0.05, 600.0):  # the second time there is little patience left
        with pytest.raises(WeightsUnreadable, match="no buffer"):
            ring.enter(2, FORWARD)
    ring.patience = 5.0
    threading.Timer(0.02, blocks[1].gate.set).start()
    ring.enter(2, FORWARD)


def test_it_counts_what_it_reads_and_how_long_visits_wait() -> None:
    ring, blocks, _ = make([0, 1, 2])
    for block in blocks.values():
        block.seconds = 0.05
    before = ring.total
    visit(ring, 0)  # waits for its own read; 1 and 2 are read ahead meanwhile
    waited = (ring.total - before).waited
    visit(ring, 1)
    done = ring.total - before
    assert 0.05 <= waited < 0.1 and done.waited - waited < 0.03
    assert 0.15 <= done.seconds < 0.3 and done.nbytes == 0  # of three blocks that have no bytes


def test_dry_visits_read_nothing_and_find_zeros() -> None:
    ring, blocks, notes = make(range(1, 6))
    visit(ring, 1)
    ring.enter(2, FORWARD)
    with pytest.raises(AssertionError, match="a visit goes on"):
        ring.dry = True
    ring.leave(2)
    ring.dry = True
    for block in blocks.values():
        block.place = 0  # what `bind` looks for
    notes.clear()
    for place in (1, 2, 3, 4, 2, 1, 1):
        visit(ring, place)
    for place in (1, 2, 3):  # more at a time than there are buffers
        ring.enter(place, FORWARD)
    for place in (1, 2, 3):
        ring.leave(place)
    assert notes == [("bind", 0)] * 10 and ring.dry
    ring.dry = False
    for place, block in blocks.items():
        block.place = place
    notes.clear()
    for place in (1, 2, 3, 4, 5):
        visit(ring, place)
    assert [place for kind, place in notes if kind == "bind"] == [1, 2, 3, 4, 5]
