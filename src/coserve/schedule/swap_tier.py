"""The second tier of pages as all bases of an engine have it in common: its bytes, what moving one takes, and
the copies that a plan moves. What is worth moving is decided base by base (`schedule.swapping`)."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeAlias

from coserve.core.plan import STAGED, Moved, SwapIn, SwapOut
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.newcomers import INFINITE

Name: TypeAlias = int | bytes  # of a copy

GUESS: Final = 1e-9  # seconds a byte before anything was measured: a disk, rather fast, so that it is tried
_MEMORY: Final = 0.25  # weight of a measurement in the running mean
_OUTLIER: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_FORGOTTEN: Final = 60.0  # seconds in which half of what a slow tier taught is forgotten: it is tried again
_BARRED: Final = 60.0  # seconds without further copies after one that could not be written or read
_PARTS: Final = 4  # copies that are written at once, where a sequence has more than fits into one
STUCK: Final = 10.0  # seconds of steps in which no move has ended, after which nobody waits for one


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


@dataclass(frozen=True, slots=True)
class _Unwritten:
    """The owner of pages that are held until there is room to stage their copy."""

    copy: Name


@dataclass(slots=True)
class Moves:
    """Copies of a base's pages that the plan under construction makes, reads and drops, by their names."""

    out: dict[Name, SwapOut] = field(default_factory=dict)
    back: dict[Name, SwapIn] = field(default_factory=dict)
    dropped: list[Name] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back or self.dropped)


class SwapTier:
    """A tier of `nbytes`, whose first guess is `byte_seconds` a byte, one way. Copies of sequences have
    `numbers` of their own whatever their base, and those that nobody needs make room for any.

    `on_failure` is called for sequences whose copy could not be written or read, or does not move.
    """

    def __init__(self, nbytes: int, byte_seconds: float = 0.0) -> None:
        self.nbytes, self.used = nbytes, 0  # of copies, and of offloaded sequences
        self.writing, self.reading = Rate(byte_seconds), Rate(byte_seconds)
        self.numbers = count(1)
        self.now = 0.0  # of the plan under construction
        self.on_failure: Callable[[Sequence], None] = lambda sequence: None
        self._copies: list[SwapCopies] = []  # of each base
        self.barred_until = -INFINITE  # a minute after the last failure

    def add(self, copies: "SwapCopies") -> None:
        """Adds the copies of a base's pages."""
        self._copies.append(copies)

    @property
    def has_moves(self) -> bool:
        """Tells whether the plan under construction moves anything."""
        return any(copies.moves for copies in self._copies)

    @property
    def room(self) -> int:
        """Bytes that copies can have."""
        return self.nbytes - self.used + sum(copies.unneeded for copies in self._copies)

    def make_room(self, nbytes: int) -> bool:
        """Evicts copies that nobody needs until `nbytes` are free, of the base that has most of them; False,
        with nothing changed, if they cannot be."""
        if nbytes > self.room:
            return False
        while nbytes > self.nbytes - self.used:
            max(self._copies, key=lambda copies: copies.unneeded).evict()
        return True

    def apply(self, moved: Iterable[tuple["SwapCopies", Moved]], now: float) -> tuple[int, int]:
        """Applies the moves of each base's copies that have ended: sequences whose pages were read run from
        now on. Returns the pages written and read, without those that failed."""
        moved = list(moved)
        pages = [(copies, copies.take_ended(its, now)) for copies, its in moved]
        if any(its.failed for _, its in moved):
            self.barred_until = now + _BARRED
        else:
            out = sum(copies.page_nbytes * written for copies, (written, _) in pages)
            back = sum(copies.page_nbytes * read for copies, (_, read) in pages)
            self.writing.observe(out, sum(its.seconds[0] for _, its in moved), now)
            self.reading.observe(back, sum(its.seconds[1] for _, its in moved), now)
        return sum(written for _, (written, _) in pages), sum(read for _, (_, read) in pages)


class SwapCopies:
    """Copies of a base's pages in a tier, which has room for at most `pages` of them, of `page_nbytes` each.
    They are those of sequences, the `owners`, and those of cached pages, the least recently used first, which
    are `evictable`: they make room for others, of any base.

    Plans move them beside steps, and write no more at a time than `staged` pages, or one copy: no step waits
    for a copy to be written. A sequence with more than `most` pages has several copies. Pages of which no
    copy has been begun yet, the `unwritten` ones, are held in the `pool`.
    """

    def __init__(self, tier: SwapTier, pages: int, page_nbytes: int) -> None:
        self.pages, self.page_nbytes = pages, page_nbytes
        self.staged = STAGED // page_nbytes
        self.pool = PagePool(0, 1)
        self.moves = Moves()
        self.owners: dict[Name, Sequence] = {}  # by copy, until it is read or dropped
        self.unwritten: dict[Name, tuple[int, ...]] = {}
        self.evictable: OrderedDict[Hashable, None] = OrderedDict()
        self._tier = tier
        self._sizes: dict[Name, int] = {}  # pages of each copy in the tier
        self._dropped: dict[Name, int] = {}  # that have room there until their moves have ended
        self._writing: dict[Name, int] = {}  # pages of moves that no result has told of
        self._reading: dict[Name, int] = {}
        self._planned = self._waited = 0.0  # when the last plan was made; seconds in steps since a move ended
        tier.add(self)

    @property
    def used(self) -> int:
        """Pages of all copies."""
        return sum(self._sizes.values())

    @property
    def most(self) -> int:
        """Most pages of one copy."""
        return max(self.staged // _PARTS, 1)

    @property
    def unneeded(self) -> int:
        """Bytes of copies that can be evicted. What is being written has its room until that has ended."""
        return (len(self.evictable) - len(self.evictable.keys() & self._writing.keys())) * self.page_nbytes

    @property
    def room(self) -> int:
        """Pages that a copy can have."""
        return min(self.pages, self._tier.room // self.page_nbytes)

    def make_room(self, pages: int) -> bool:
        """Evicts copies that nobody needs until `pages` fit; False, with nothing changed, if they cannot."""
        return pages <= self.pages and self._tier.make_room(pages * self.page_nbytes)

    def evict(self) -> None:
        """Drops the least recently used copy of a cached page."""
        name = next(one for one in self.evictable if one not in self._writing)
        assert isinstance(name, int | bytes), "it has been added"
        del self.evictable[name]
        self.remove(name)

    def may_write(self, pages: int, now: float) -> bool:
        """Tells whether copying so many pages can begin at once, and the tier works."""
        is_free = not self.unwritten and self._can_stage(min(pages, self.most))
        return is_free and self._tier.barred_until <= now

    def _can_stage(self, pages: int) -> bool:
        waiting = sum(self._writing.values()) + sum(len(move.pages) for move in self.moves.out.values())
        return not waiting or waiting + pages <= self.staged

    def write_on(self) -> None:
        """Has the plan copy pages that were held until there is room for them."""
        for name, pages in [*self.unwritten.items()]:
            if not self._can_stage(len(pages)):
                break
            self.moves.out[name] = SwapOut(name, pages)
            self._let_go(name)

    def _let_go(self, name: Name) -> None:
        if self.unwritten.pop(name, None) is not None:
            self.pool.free(_Unwritten(name))

    @property
    def is_stuck(self) -> bool:
        """Tells whether no move has ended for long although some are under way."""
        return self._waited > STUCK

    def is_unwritten(self, sequence: Sequence) -> bool:
        """Tells whether some pages of a sequence's copy are held until they are written."""
        copy = sequence.swapped
        return copy is not None and copy.numbers[-1] in self.unwritten

    @property
    def are_moving(self) -> bool:
        """Tells whether a result is still to tell of any move."""
        return bool(self._writing or self._reading)

    def is_moving(self, name: Name) -> bool:
        """Tells whether a result is still to tell of a move of this name."""
        return name in self._writing or name in self._reading

    def add(self, name: Name, pages: tuple[int, ...]) -> None:
        """Has plans copy `pages`, for which there is room, under a name that has no moves."""
        self._sizes[name] = len(pages)
        self._tier.used += len(pages) * self.page_nbytes
        if not self.unwritten and self._can_stage(len(pages)):
            self.moves.out[name] = SwapOut(name, pages)
        else:
            self.unwritten[name] = pages
            self.pool.allocate(_Unwritten(name), 0, pages)

    def remove(self, name: Name) -> None:
        """Drops a copy that has not been read."""
        if self.moves.out.pop(name, None) is not None or name in self.unwritten:
            self._let_go(name)
            self._forget(name)
            return
        self.moves.dropped.append(name)
        if self.is_moving(name):
            self._dropped[name] = self._sizes.pop(name)
        else:
            self._forget(name)

    def _forget(self, name: Name) -> None:
        """Frees the pages of a copy that is read or dropped."""
        self._tier.used -= self._sizes.pop(name) * self.page_nbytes

    def take(self) -> Moves:
        """The plan's moves: a copy that it reads is no longer its sequence's, and parts of it that are not
        read are dropped."""
        self._planned = self._tier.now
        for sequence in {self.owners[name].key: self.owners[name] for name in self.moves.back}.values():
            copy, sequence.swapped = sequence.swapped, None
            for number in () if copy is None else copy.numbers:
                if number not in self.moves.back:
                    del self.owners[number]
                    self.remove(number)
        moves, self.moves = self.moves, Moves()
        self._writing |= {name: len(move.pages) for name, move in moves.out.items()}
        self._reading |= {name: len(move.pages) for name, move in moves.back.items()}
        return moves

    def take_ended(self, moved: Moved, now: float) -> tuple[int, int]:
        """Lets go of what has been moved. Returns the pages written and read, without those of copies that
        failed or were dropped."""
        written, read = (
            {name: pages.pop(name) for name in names}
            for names, pages in ((moved.out, self._writing), (moved.back, self._reading))
        )
        lost = {*moved.failed, *self._dropped}
        for name in written:
            if name not in moved.failed:
                continue
            sequence = self.owners.get(name)
            if sequence is None and name in self.evictable:
                del self.evictable[name]
                self.remove(name)
            elif sequence is not None and not sequence.loading:  # else its `SwapIn` fails, too
                self._tier.on_failure(sequence)
        for name in self._dropped.keys() & (written.keys() | read.keys()):
            if not self.is_moving(name):
                self._tier.used -= self._dropped.pop(name) * self.page_nbytes
        for name in read:
            sequence = self.owners.pop(name, None)
            if sequence is None:  # it was dropped meanwhile
                continue
            self._forget(name)
            sequence.loading = tuple(other for other in sequence.loading if other != name)
            if name in moved.failed:
                self._tier.on_failure(sequence)
        has_waited = self.are_moving and not (written or read)
        self._waited = self._waited + max(now - self._planned, 0.0) if has_waited else 0.0
        if self.is_stuck:  # nobody waits for a disk that hangs
            self._tier.barred_until = now + _BARRED
            for sequence in {one.key: one for one in self.owners.values()}.values():
                self._tier.on_failure(sequence)
        return (
            sum(pages for name, pages in written.items() if name not in lost),
            sum(pages for name, pages in read.items() if name not in lost),
        )
