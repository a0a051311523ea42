"""The second tier of pages: what a preempted sequence had computed is read again instead of computed again.

vLLM's swapping and Symbiosis' caches elsewhere (3.4), with the choice made anew for each preemption: by the
predicted seconds of computing the tokens again, and those of writing and reading their pages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from coserve.core.plan import Plan, StepResult, SwapIn, SwapOut
from coserve.core.sequence import Sequence, SwapCopy
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features
from coserve.schedule.newcomers import INFINITE

GUESS: Final = 1e-9  # seconds a byte before anything was measured: a disk, rather fast, so that it is tried
_MEMORY: Final = 0.25  # of a measurement in the running mean
_OUTLIER: Final = 4.0  # a step this many times slower teaches no more than one exactly so
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
        """Learns from a step that moved pages."""
        if not pages or seconds <= 0:
            return
        known = self.seconds(now)
        taken = min(seconds / pages, known * _OUTLIER)
        self.measured = taken if self.measured is None else known + _MEMORY * (taken - known)
        self.measured_at = now


@dataclass(slots=True)
class Moves:
    """Copies that the plan under construction makes, reads and drops, by their numbers."""

    out: dict[int, SwapOut] = field(default_factory=dict)
    back: dict[int, SwapIn] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.out or self.back or self.dropped)


class Swapping:
    """Room and cost of a second tier of `pages`, and the copies in it. `page_seconds` is the guess for one
    page, one way. `on_failure` is called for sequences whose copy could not be written or read."""

    def __init__(self, cost: CostModel, pages: int = 0, page_seconds: float = 0.0) -> None:
        self.pages = pages
        self.used = 0  # pages of copies
        self.writing, self.reading = Rate(page_seconds), Rate(page_seconds)
        self.moves = Moves()
        self.limit = INFINITE  # seconds that the moves of the plan under construction may take
        self.planned = 0.0  # seconds of the moves of the last plan
        self._cost = cost
        self._numbers = count(1)
        self.on_failure: Callable[[Sequence], None] = lambda sequence: None
        self._owners: dict[int, Sequence] = {}  # by copy, until it is read or dropped
        self._barred = -INFINITE

    def is_worth(self, sequence: Sequence, start: int, pages: int, now: float) -> bool:
        """Tells whether moving `pages` there and back takes less than computing the tokens from `start` on
        again, and there is room."""
        if pages <= 0 or pages > self.pages - self.used or now < self._barred + _BARRED:
            return False
        writing, reading = pages * self.writing.seconds(now), pages * self.reading.seconds(now)
        if max(self.seconds(now) + writing, reading) > self.limit:
            return False
        return writing + reading < self._computing(sequence, start)

    def has_time(self, copy: SwapCopy, now: float) -> bool:
        """Tells whether the plan can read a copy as well."""
        return self.seconds(now) + copy.pages * self.reading.seconds(now) <= self.limit

    def _computing(self, sequence: Sequence, start: int) -> float:
        """Seconds that the rows of the tokens from `start` on add to steps."""
        rows, adapter = sequence.computed - start, sequence.request.adapter
        with_them, without = Features(), Features()
        with_them.add_inference(sequence.virtual + start, rows, 0, adapter)
        without.add_inference(0, 0, 0, adapter)
        return self._cost.predict_features(with_them) - self._cost.predict_features(without)

    def seconds(self, now: float) -> float:
        """Predicted seconds of the moves so far."""
        written = sum(len(move.pages) for move in self.moves.out.values())
        read = sum(len(move.pages) for move in self.moves.back.values())
        return written * self.writing.seconds(now) + read * self.reading.seconds(now)

    # Copies

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Has the plan copy pages [first, end) of a sequence's block table, with all that it has computed."""
        number, pages = next(self._numbers), tuple(sequence.pages[first:end])
        sequence.swapped = SwapCopy(number, first, len(pages), sequence.computed)
        self.moves.out[number] = SwapOut(number, pages)
        self._owners[number] = sequence
        self.used += len(pages)

    def read(self, sequence: Sequence) -> None:
        """Has the plan fill the pages behind those that a sequence shares from its copy."""
        copy = sequence.swapped
        assert copy is not None, "what is read was written"
        pages = tuple(sequence.pages[sequence.shared : sequence.shared + sequence.filled])
        self.moves.back[copy.number] = SwapIn(copy.number, pages, sequence.shared - copy.first)
        sequence.loading = copy

    def withdraw(self, sequence: Sequence) -> None:
        """Gives up reading for a sequence that loses its pages again. It keeps a copy that no plan has read
        yet."""
        copy, sequence.loading = sequence.loading, None
        assert copy is not None, "its pages are being read"
        if self.moves.back.pop(copy.number, None) is None:
            del self._owners[copy.number]

    def drop(self, sequence: Sequence) -> None:
        """Drops the copy of a sequence that needs it no longer, if there is one."""
        copy, sequence.swapped = sequence.swapped, None
        if copy is not None:
            del self._owners[copy.number]
            self.used -= copy.pages
            if self.moves.out.pop(copy.number, None) is None:
                self.moves.dropped.append(copy.number)

    def take(self, now: float) -> Moves:
        """The plan's moves: copies that it reads are gone afterwards."""
        self.planned = self.seconds(now)
        moves, self.moves = self.moves, Moves()
        for number in moves.back:
            sequence = self._owners[number]
            assert sequence.swapped is not None, "it is read once"
            self.used -= sequence.swapped.pages
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
            sequence = self._owners.get(out.copy) if out.copy in lost else None
            if sequence is not None and sequence.loading is None:  # else its `SwapIn` fails, too
                self.on_failure(sequence)
        for back in plan.swap_in:
            sequence = self._owners.pop(back.copy, None)
            if sequence is not None:
                sequence.loading = None
                if back.copy in lost:
                    self.on_failure(sequence)
        out_pages = sum(len(move.pages) for move in plan.swap_out if move.copy not in lost)
        return out_pages, sum(len(move.pages) for move in plan.swap_in if move.copy not in lost)


def longest_moves(running: Iterable[Sequence], now: float, cost: CostModel, config: SchedulerConfig) -> float:
    """Seconds that a step's swaps may take, so that each running sequence's next token keeps its bound:
    nothing can be done beside them."""
    running = [one for one in running if one.newest_at is not None]
    due, margin, features = INFINITE, 0.0, Features()
    for one in running:
        features.add_inference(one.virtual + one.computed, 1, 1, one.request.adapter, one.offloaded)
        if (bound := one.request.slo.between_tokens) is not None and one.newest_at is not None:
            due = min(due, one.newest_at + bound)
            tokens = one.request.sampling.max_tokens
            margin = max(margin, cost.margin(config, trains=False, tokens=tokens))
    if due == INFINITE:
        return INFINITE
    return max((due - now) / (1 + margin) - cost.predict_features(features), 0.0)
