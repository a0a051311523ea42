"""The second tier of pages as all bases of an engine have it in common: its bytes, what moving one takes, and
the copies that a plan moves. What is worth moving is decided base by base (`schedule.swapping`)."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from coserve.core.plan import BasePlan, BaseResult, SwapIn, SwapOut
from coserve.core.sequence import Sequence
from coserve.schedule.newcomers import INFINITE

GUESS: Final = 1e-9  # seconds a byte before anything was measured: a disk, rather fast, so that it is tried
_MEMORY: Final = 0.25  # weight of a measurement in the running mean
_OUTLIER: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_FORGOTTEN: Final = 60.0  # seconds in which half of what a slow tier taught is forgotten: it is tried again
_BARRED: Final = 60.0  # seconds without further copies after one that could not be written or read


@dataclass(slots=True)
class Rate:
    """Seconds a byte, one way: as guessed, or as measured lately."""

    guess: float
    measured: float | None = None
    measured_at: float = 0.0

    def seconds(self, now: float) -> float:
        """The present estimate."""
        if self.measured is None or self.measured <= self.guess:
            return self.guess if self.measured is None else self.measured
        left: float = 0.5 ** (max(now - self.measured_at, 0.0) / _FORGOTTEN)
        return max(self.measured * left, self.guess)

    def observe(self, nbytes: int, seconds: float, now: float) -> None:
        """Learns from a step that moved bytes. The first measurement replaces the guess: an approach in steps
        would end just above the bound of what is worth it, and fall below it again seconds later."""
        if not nbytes or seconds <= 0:
            return
        known, taken = self.seconds(now), seconds / nbytes
        if self.measured is not None:
            taken = known + _MEMORY * (min(taken, known * _OUTLIER) - known)
        self.measured = taken
        self.measured_at = now


@dataclass(slots=True)
class Moves:
    """Copies of a base's pages that the plan under construction makes, reads and drops, by their numbers."""

    out: dict[int, SwapOut] = field(default_factory=dict)
    back: dict[int, SwapIn] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back or self.dropped)


class SwapTier:
    """A tier of `nbytes`, whose first guess is `byte_seconds` a byte, one way. Copies have numbers of their
    own whatever their base, and those that nobody needs make room for any.

    `on_failure` is called for sequences whose copy could not be written or read.
    """

    def __init__(self, nbytes: int, byte_seconds: float = 0.0) -> None:
        self.nbytes, self.used = nbytes, 0  # of copies, and of offloaded sequences
        self.writing, self.reading = Rate(byte_seconds), Rate(byte_seconds)
        self.numbers = count(1)
        self.now = 0.0  # of the plan under construction
        self.limit = INFINITE  # seconds that its moves may take
        self.planned = 0.0  # seconds of the moves of the last plan
        self.on_failure: Callable[[Sequence], None] = lambda sequence: None
        self._copies: list[SwapCopies] = []  # of each base
        self._barred_until = -INFINITE

    def add(self, copies: "SwapCopies") -> None:
        """Adds the copies of a base's pages."""
        self._copies.append(copies)

    def begin(self, now: float, limit: float) -> None:
        """Begins a plan, whose moves may take `limit` seconds."""
        self.now, self.limit = now, limit

    def is_barred(self, now: float) -> bool:
        """Tells whether the tier has failed in the last minute."""
        return now < self._barred_until

    def seconds(self, now: float) -> float:
        """Predicted seconds of the moves so far."""
        written = sum(copies.nbytes(copies.moves.out.values()) for copies in self._copies)
        read = sum(copies.nbytes(copies.moves.back.values()) for copies in self._copies)
        return written * self.writing.seconds(now) + read * self.reading.seconds(now)

    @property
    def has_moves(self) -> bool:
        """Tells whether the plan under construction moves anything."""
        return any(copies.moves for copies in self._copies)

    @property
    def is_reading(self) -> bool:
        """Tells whether the plan under construction reads copies."""
        return any(copies.moves.back for copies in self._copies)

    @property
    def room(self) -> int:
        """Bytes that copies can have."""
        unneeded = sum(len(copies.evictable) * copies.page_nbytes for copies in self._copies)
        return self.nbytes - self.used + unneeded

    def make_room(self, nbytes: int) -> bool:
        """Evicts copies that nobody needs until `nbytes` are free, of the base that has most of them; False,
        with nothing changed, if they cannot be."""
        if nbytes > self.room:
            return False
        while nbytes > self.nbytes - self.used:
            max(self._copies, key=lambda copies: len(copies.evictable) * copies.page_nbytes).evict()
        return True

    def apply(
        self, moved: Iterable[tuple["SwapCopies", BasePlan, BaseResult]], now: float
    ) -> tuple[int, int]:
        """Applies the results of the moves in each base's plan: sequences whose pages were read run from now
        on. Returns the pages written and read."""
        moved = list(moved)
        if any(result.swap_failed for _, _, result in moved):
            self._barred_until = now + _BARRED
        else:
            out = sum(copies.nbytes(plan.swap_out) for copies, plan, _ in moved)
            back = sum(copies.nbytes(plan.swap_in) for copies, plan, _ in moved)
            self.writing.observe(out, sum(result.swap_seconds[0] for _, _, result in moved), now)
            self.reading.observe(back, sum(result.swap_seconds[1] for _, _, result in moved), now)
        counts = [self._end(*each) for each in moved]
        return sum(written for written, _ in counts), sum(read for _, read in counts)

    def _end(self, copies: "SwapCopies", plan: BasePlan, result: BaseResult) -> tuple[int, int]:
        """Lets go of what a plan has moved. Returns the pages written and read."""
        lost = {*result.swap_failed}
        for out in plan.swap_out:
            if out.copy not in lost:
                continue
            sequence = copies.owners.get(out.copy)
            if sequence is None:
                copies.lose(out.copy)
            elif not sequence.loading:  # else its `SwapIn` fails, too
                self.on_failure(sequence)
        for back in plan.swap_in:
            sequence = copies.owners.pop(back.copy, None)
            if sequence is not None:
                sequence.loading = ()
                if back.copy in lost:
                    self.on_failure(sequence)
        written = sum(len(move.pages) for move in plan.swap_out if move.copy not in lost)
        return written, sum(len(move.pages) for move in plan.swap_in if move.copy not in lost)


class SwapCopies:
    """Copies of a base's pages in a tier, which has room for at most `pages` of them, of `page_nbytes` each.
    They are those of sequences, the `owners`, and those of cached pages by name, the least recently used
    first, which are `evictable`: they make room for others, of any base."""

    def __init__(self, tier: SwapTier, pages: int, page_nbytes: int) -> None:
        self.pages, self.page_nbytes = pages, page_nbytes
        self.moves = Moves()
        self.owners: dict[int, Sequence] = {}  # by copy, until it is read or dropped
        self.evictable: OrderedDict[Hashable, int] = OrderedDict()
        self._tier = tier
        self._sizes: dict[int, int] = {}  # pages of each copy in the tier
        tier.add(self)

    @property
    def used(self) -> int:
        """Pages of all copies."""
        return sum(self._sizes.values())

    @property
    def room(self) -> int:
        """Pages that a copy can have."""
        return min(self.pages, self._tier.room // self.page_nbytes)

    def make_room(self, pages: int) -> bool:
        """Evicts copies that nobody needs until `pages` fit; False, with nothing changed, if they cannot."""
        return pages <= self.pages and self._tier.make_room(pages * self.page_nbytes)

    def evict(self) -> None:
        """Drops the least recently used copy of a cached page."""
        self.remove(self.evictable.popitem(last=False)[1])

    def lose(self, number: int) -> None:
        """Drops the copy of a cached page that could not be written, if it is still there."""
        for name in [name for name, its in self.evictable.items() if its == number]:
            self.remove(self.evictable.pop(name))

    def add(self, pages: tuple[int, ...]) -> int:
        """Has the plan copy `pages`, for which there is room; returns the copy's number."""
        number = next(self._tier.numbers)
        self.moves.out[number] = SwapOut(number, pages)
        self._sizes[number] = len(pages)
        self._tier.used += len(pages) * self.page_nbytes
        return number

    def remove(self, number: int) -> None:
        """Drops a copy that no plan has read."""
        self.forget(number)
        if self.moves.out.pop(number, None) is None:
            self.moves.dropped.append(number)

    def forget(self, number: int) -> None:
        """Frees the pages of a copy that is read or dropped."""
        self._tier.used -= self._sizes.pop(number) * self.page_nbytes

    def take(self) -> Moves:
        """The plan's moves: copies that it reads are gone afterwards."""
        moves, self.moves = self.moves, Moves()
        for number in moves.back:
            self.forget(number)
            sequence = self.owners[number]
            if sequence.swapped is not None and sequence.swapped.number == number:
                sequence.swapped = None
        return moves

    def nbytes(self, moves: Iterable[SwapOut | SwapIn]) -> int:
        """Bytes of the pages of moves."""
        return sum(len(move.pages) for move in moves) * self.page_nbytes
