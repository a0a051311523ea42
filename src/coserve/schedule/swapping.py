"""The second tier of pages: keys and values are read again instead of computed again.

As vLLM's swapping, and Symbiosis' caches elsewhere (3.4), but chosen anew for each preemption, by the
predicted seconds of computing the tokens again and those of writing and reading their pages. Pages of
prefixes (`schedule.swapped_prefixes`) take the room that is left.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from coserve.core.plan import Plan, StepResult, SwapIn, SwapOut
from coserve.core.sequence import Sequence, SwapCopy
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features, added_seconds
from coserve.schedule.newcomers import INFINITE

GUESS: Final = 1e-9  # seconds a byte before anything was measured: a disk, rather fast, so that it is tried
_MEMORY: Final = 0.25  # weight of a measurement in the running mean
_OUTLIER: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_FORGOTTEN: Final = 60.0  # seconds in which half of what a slow tier taught is forgotten: it is tried again
_BARRED: Final = 60.0  # seconds without further copies after one that could not be written or read


@dataclass(slots=True)
class Rate:
    """Seconds a page, one way: as guessed, or as measured lately."""

    guess: float
    measured: float | None = None
    measured_at: float = 0.0

    def seconds(self, now: float) -> float:
        """The present estimate."""
        if self.measured is None or self.measured <= self.guess:
            return self.guess if self.measured is None else self.measured
        left: float = 0.5 ** (max(now - self.measured_at, 0.0) / _FORGOTTEN)
        return max(self.measured * left, self.guess)

    def observe(self, pages: int, seconds: float, now: float) -> None:
        """Learns from a step that moved pages. The first measurement replaces the guess: an approach in steps
        would end just above the bound of what is worth it, and fall below it again seconds later."""
        if not pages or seconds <= 0:
            return
        known, taken = self.seconds(now), seconds / pages
        if self.measured is not None:
            taken = known + _MEMORY * (min(taken, known * _OUTLIER) - known)
        self.measured = taken
        self.measured_at = now


@dataclass(slots=True)
class Moves:
    """Copies that the plan under construction makes, reads and drops, by their numbers."""

    out: dict[int, SwapOut] = field(default_factory=dict)
    back: dict[int, SwapIn] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back or self.dropped)


class Evictable(Protocol):
    """Copies of a page each that nobody needs; `len` is their number."""

    def __len__(self) -> int: ...

    def evict(self) -> None:
        """Drops one."""
        ...

    def lose(self, number: int) -> None:
        """Drops copy `number`, which could not be written, if it is one of these."""
        ...


class _Nothing:
    """No copies."""

    def __len__(self) -> int:
        return 0

    def evict(self) -> None: ...

    def lose(self, number: int) -> None: ...


class SwapCopies:
    """Copies in a tier of `pages`, by their numbers, and the moves of the plan under construction. Those in
    `evictable` make room for others."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.used = 0  # pages of copies, and of offloaded sequences
        self.evictable: Evictable = _Nothing()
        self.moves = Moves()
        self._numbers = count(1)
        self._sizes: dict[int, int] = {}  # pages of each copy in the tier

    @property
    def room(self) -> int:
        """Pages that a copy can have."""
        return self.pages - self.used + len(self.evictable)

    def make_room(self, pages: int) -> bool:
        """Evicts copies that nobody needs until `pages` fit; False, with nothing changed, if they cannot."""
        if pages > self.room:
            return False
        while pages > self.pages - self.used:
            self.evictable.evict()
        return True

    def add(self, pages: tuple[int, ...]) -> int:
        """Has the plan copy `pages`, for which there is room; returns the copy's number."""
        number = next(self._numbers)
        self.moves.out[number] = SwapOut(number, pages)
        self._sizes[number] = len(pages)
        self.used += len(pages)
        return number

    def remove(self, number: int) -> None:
        """Drops a copy that no plan has read."""
        self.used -= self._sizes.pop(number)
        if self.moves.out.pop(number, None) is None:
            self.moves.dropped.append(number)

    def take(self) -> Moves:
        """The plan's moves: copies that it reads are gone afterwards."""
        moves, self.moves = self.moves, Moves()
        for number in moves.back:
            self.used -= self._sizes.pop(number)
        return moves


class Swapping:
    """Room and cost of a second tier of `pages`, and the copies in it. `page_seconds` is the guess for one
    page, one way. `on_failure` is called for sequences whose copy could not be written or read."""

    def __init__(self, cost: CostModel, pages: int = 0, page_seconds: float = 0.0) -> None:
        self.copies = SwapCopies(pages)
        self.writing, self.reading = Rate(page_seconds), Rate(page_seconds)
        self.now = 0.0  # of the plan under construction
        self.limit = INFINITE  # seconds that its moves may take
        self.planned = 0.0  # seconds of the moves of the last plan
        self.cost = cost
        self.on_failure: Callable[[Sequence], None] = lambda sequence: None
        self._owners: dict[int, Sequence] = {}  # by copy, until it is read or dropped
        self._barred = -INFINITE

    def begin(self, now: float, limit: float) -> None:
        """Begins a plan, whose moves may take `limit` seconds."""
        self.now, self.limit = now, limit

    @property
    def is_barred(self) -> bool:
        """Tells whether the tier has failed in the last minute."""
        return self.now < self._barred + _BARRED

    def is_worth(self, sequence: Sequence, start: int, pages: int, now: float) -> bool:
        """Tells whether moving `pages` there and back takes less than computing the tokens from `start` on
        again, and there is room."""
        if pages <= 0 or pages > self.copies.room or now < self._barred + _BARRED:
            return False
        writing, reading = pages * self.writing.seconds(now), pages * self.reading.seconds(now)
        if max(self.seconds(now) + writing, reading) > self.limit:
            return False
        rows, adapter = sequence.computed - start, sequence.request.adapter
        return writing + reading < added_seconds(self.cost, sequence.virtual + start, rows, adapter)

    def has_time(self, copy: SwapCopy, now: float) -> bool:
        """Tells whether the plan has time to read a copy as well."""
        return self.seconds(now) + copy.pages * self.reading.seconds(now) <= self.limit

    def seconds(self, now: float) -> float:
        """Predicted seconds of the moves so far."""
        written = sum(len(move.pages) for move in self.copies.moves.out.values())
        read = sum(len(move.pages) for move in self.copies.moves.back.values())
        return written * self.writing.seconds(now) + read * self.reading.seconds(now)

    # Copies

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Has the plan copy pages [first, end) of a sequence's block table, with all that it has computed."""
        pages = tuple(sequence.pages[first:end])
        has_room = self.copies.make_room(len(pages))
        assert has_room, "`is_worth` has found it"
        number = self.copies.add(pages)
        sequence.swapped = SwapCopy(number, first, len(pages), sequence.computed)
        self._owners[number] = sequence

    def read(self, sequence: Sequence) -> None:
        """Has the plan fill the pages behind those that a sequence shares from its copy."""
        copy = sequence.swapped
        assert copy is not None, "what is read was written"
        pages = tuple(sequence.pages[sequence.shared : sequence.shared + sequence.filled])
        self.copies.moves.back[copy.number] = SwapIn(copy.number, pages, sequence.shared - copy.first)
        sequence.loading = (copy.number,)

    def read_single(self, sequence: Sequence, numbers: Iterable[int]) -> None:
        """Has the plan fill a sequence's pages behind the shared ones from copies of one page each."""
        sequence.loading = tuple(numbers)
        for number, page in zip(sequence.loading, sequence.pages[sequence.shared :], strict=False):
            self.copies.moves.back[number] = SwapIn(number, (page,))
            self._owners[number] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Gives up reading for a sequence that loses its pages again. It keeps a copy of its own that no plan
        has read yet."""
        numbers, sequence.loading = sequence.loading, ()
        for number in numbers:
            if self.copies.moves.back.pop(number, None) is None:
                del self._owners[number]
            elif sequence.swapped is None or number != sequence.swapped.number:
                self._remove(number)

    def drop(self, sequence: Sequence) -> None:
        """Drops the copy of a sequence that needs it no longer, if there is one."""
        copy, sequence.swapped = sequence.swapped, None
        if copy is not None:
            self._remove(copy.number)

    def _remove(self, number: int) -> None:
        del self._owners[number]
        self.copies.remove(number)

    def take(self, now: float) -> Moves:
        """The plan's moves: copies that it reads are gone afterwards."""
        self.planned = self.seconds(now)
        moves = self.copies.take()
        for number in moves.back:
            sequence = self._owners[number]
            if sequence.swapped is not None and sequence.swapped.number == number:
                sequence.swapped = None
        return moves

    def apply(self, plan: Plan, result: StepResult, now: float) -> tuple[int, int]:
        """Applies the result of a plan's moves: sequences whose pages were read run from now on. Returns the
        pages written and read."""
        written, read = result.swap_seconds
        pages = [sum(len(move.pages) for move in moves) for moves in (plan.swap_out, plan.swap_in)]
        if result.swap_failed:
            self._barred = now
        else:
            self.writing.observe(pages[0], written, now)
            self.reading.observe(pages[1], read, now)
        lost = {*result.swap_failed}
        for out in plan.swap_out:
            if out.copy not in lost:
                continue
            sequence = self._owners.get(out.copy)
            if sequence is None:
                self.copies.evictable.lose(out.copy)
            elif not sequence.loading:  # else its `SwapIn` fails, too
                self.on_failure(sequence)
        for back in plan.swap_in:
            sequence = self._owners.pop(back.copy, None)
            if sequence is not None:
                sequence.loading = ()
                if back.copy in lost:
                    self.on_failure(sequence)
        out_pages = sum(len(move.pages) for move in plan.swap_out if move.copy not in lost)
        return out_pages, sum(len(move.pages) for move in plan.swap_in if move.copy not in lost)


def longest_moves(running: Iterable[Sequence], now: float, cost: CostModel, config: SchedulerConfig) -> float:
    """Most seconds of a step's swaps, so that each running sequence's next token keeps its bound: rows wait
    for them."""
    running = [one for one in running if one.newest_at is not None]
    due, margin = INFINITE, 0.0
    for one in running:
        if (bound := one.request.slo.between_tokens) is not None and one.newest_at is not None:
            due = min(due, one.newest_at + bound)
            tokens = one.request.sampling.max_tokens
            margin = max(margin, cost.margin(config, trains=False, tokens=tokens))
    if due == INFINITE:
        return INFINITE
    features = Features()
    for one in running:
        start, request = one.virtual + one.computed, one.request
        features.add_inference(start, 1, 1, request.adapter, one.offloaded, request.base)
    return max((due - now) / (1 + margin) - cost.predict_features(features), 0.0)
