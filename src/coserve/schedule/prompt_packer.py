"""Packs prompts into a step, the most urgent first."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.newcomers import is_new
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.step_costs import StepCosts

INFINITE = float("inf")


@dataclass(slots=True)
class PromptPacker:
    """Adds prompt rows to a builder: at most `left`, while the step is predicted to take at most `limit`
    seconds.

    No sequence enters whose base is in `closed`: the step preempted a sequence of that base, or one found no
    pages, and pages would only change hands again. The first chunk of a step has `least` rows even where
    these take longer than `limit`.
    """

    builder: PlanBuilder
    queues: RequestQueues
    cost: StepCosts
    config: SchedulerConfig
    left: int
    limit: float
    closed: set[str]
    least: int

    def pack(self, line: Iterable[Sequence]) -> None:
        """Adds rows of the sequences in `line`, in its order; those without pages enter."""
        for sequence in line:
            if not self._is_ready(sequence):
                continue
            filled = self.queues.caches.of(sequence).prefixes.rows(sequence.request)
            rows = self._chunk(sequence, filled)
            if rows <= 0:
                return
            if not sequence.pages and not self._enter(sequence):
                continue
            self.builder.add(sequence, rows, filled)
            self.left -= filled + rows

    def _is_ready(self, sequence: Sequence) -> bool:
        """Tells whether the step can have rows of a sequence. If the second tier has its beginning, the
        sequence enters, and its rows wait until that is read."""
        cache, is_closed = self.queues.caches.of(sequence), sequence.request.base in self.closed
        if is_closed and not sequence.pages and not sequence.offloaded:
            return False  # those with pages may come later in the line
        if not sequence.pages:  # sequences before it may have taken its cached pages
            self.queues.look_up(sequence)
        if cache.swapping.copies.is_unwritten(sequence):
            return False
        if sequence.swapped is None and not cache.prefixes.reads(sequence):
            return True
        return not is_closed and self._enter(sequence) and not sequence.loading

    def _enter(self, sequence: Sequence) -> bool:
        """Starts a waiting sequence if there are pages for it."""
        has_entered = self.queues.enter(sequence, self.builder.now)
        if not has_entered and not sequence.offloaded:  # whose pages are elsewhere
            self.closed.add(sequence.request.base)
        return has_entered

    def _chunk(self, sequence: Sequence, filled: int) -> int:
        """Number of prompt rows that keeps the step within its limit; its first chunk has a minimum.

        `filled` virtual tokens pass before them, all at once.
        """
        beside = any(map(is_new, self.queues.running)) and not is_new(sequence)
        limit = INFINITE if is_new(sequence) else self.limit  # a newcomer is not held to others' bounds
        first = all(segment.known == 1 for segment in self.builder.inference)
        cut = self.queues.caches.of(sequence).prefixes.next_cut(sequence)
        most = min(self.left, sequence.remaining, cut - sequence.computed)
        least = min(self.least, most) if first and not beside else 0
        if limit < INFINITE:
            most = self._largest_chunk(sequence, filled, least, most, limit)
        rows = self.builder.rows_of(sequence.request.base)
        whole = self.queues.caches.of(sequence).config.row_buckets.whole_rows(rows + most) - rows
        return whole if whole > 0 and most < sequence.remaining else most

    def _largest_chunk(self, sequence: Sequence, filled: int, least: int, most: int, limit: float) -> int:
        """The most rows, between `least` and `most`, that are predicted to keep the step within `limit`."""

        def seconds(rows: int) -> float:
            return self.cost.predict_features(self.builder.with_rows(sequence, rows, filled))

        return least + bisect_right(range(least + 1, most + 1), limit, key=seconds)
