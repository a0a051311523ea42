"""Fills a step with training, as much as the budget holds (FlexLLM, 6.2), in rows and layers."""

from collections.abc import Iterable

from coserve.core.plan import Segment
from coserve.core.sequence import Direction, MicroBatch
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, window_pairs
from coserve.schedule.draft import Draft
from coserve.schedule.policies.base import Allowance


class Filler:
    """Adds training to a draft while the allowance lasts. `left` are its remaining seconds."""

    def __init__(self, draft: Draft, allowance: Allowance, cost: CostModel, config: SchedulerConfig) -> None:
        self.left = allowance.seconds
        self._minimum = allowance.minimum
        self._allowance = allowance
        self._draft = draft
        self._cost = cost
        self._config = config
        self._pairs: dict[tuple[int, int, int], int] = {}  # of windows that were considered
        self._before = (
            cost.predict_features(draft.trained) if draft.inference and draft.split is None else 0.0
        )

    def update(self, job: str) -> bool:
        """Adds a job's optimizer step, if it fits."""
        if not self._may_train(job):
            return False
        features = self._draft.trained.copy()
        features.add_update()
        seconds = self._cost.predict_features(features) - self._before
        if seconds > max(self.left, self._pop_minimum()):
            return False
        self._draft.updates.append(job)
        self._draft.trained.add_update()
        self._spend(seconds)
        return True

    def window(self, batch: MicroBatch) -> bool:
        """Adds the next piece of a micro-batch: as much as fits, or its smallest part within the minimum."""
        if self._allowance.rows == 0 or not self._may_train(batch.job):
            return False
        minimum, sizes = self._pop_minimum(), self._sizes(batch)
        chosen = self._largest(batch, sizes, self.left)
        if chosen is None and self._seconds(batch, sizes[-1], 1) <= minimum:
            chosen = sizes[-1], 1
        if chosen is None:
            return False
        self._add(batch, *chosen)
        return True

    def _may_train(self, job: str) -> bool:
        return self._allowance.job in (None, job)

    def _pop_minimum(self) -> float:
        """The minimum is for the first piece in turn only."""
        minimum, self._minimum = self._minimum, 0.0
        return minimum

    def _sizes(self, batch: MicroBatch) -> list[int]:
        """Rows that the next window may have, most first; what lies put down can be cut to any of them."""
        # A row's head and loss may take as long as several of its layers.
        share = 4 if batch.direction is Direction.LOSS else 1
        if self._config.training_window is not None:
            return [min(max(1, self._config.training_window // share), batch.rows_left)]
        most, least = self._allowance.rows, max(1, self._config.min_training_rows // share)
        if most is None:
            return [batch.rows_left]
        if self._draft.training and not self._draft.inference:
            # What is left of a step is worth less than a window that stays whole: see `_largest`.
            return [min(most, batch.rows_left)]
        ladder = [most]
        while ladder[-1] > least:
            ladder.append(max(ladder[-1] // 2, least))
        return list(dict.fromkeys(min(rows, batch.rows_left) for rows in ladder))

    def _largest(self, batch: MicroBatch, sizes: Iterable[int], budget: float) -> tuple[int, int] | None:
        """(rows, layers) within `budget`: as many rows as get through one layer, then as many layers.

        Fewer rows may fill the budget better, but each part of a window that was cut reads the weights of all
        layers that are left once more.
        """
        for rows in sizes:
            layers = self._layers(batch, rows, budget)
            if layers:
                return rows, layers
        return None

    def _layers(self, batch: MicroBatch, rows: int, budget: float) -> int:
        """Most layers of a window of `rows` rows that fit into `budget`."""
        low, high = 0, len(batch.next_span(batch.layers))
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds(batch, rows, middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def _seconds(self, batch: MicroBatch, rows: int, layers: int) -> float:
        """What a piece would add to the step."""
        features = self._draft.trained.copy()
        window = (batch.key, *batch.next_window(rows))
        if window not in self._pairs:
            self._pairs[window] = window_pairs(batch, *window[1:])
        features.add_training(batch, window[2], self._pairs[window], batch.direction, batch.next_span(layers))
        return self._cost.predict_features(features) - self._before

    def _add(self, batch: MicroBatch, rows: int, layers: int) -> None:
        seconds = self._seconds(batch, rows, layers)
        start, rows = batch.next_window(rows)
        segment = Segment(batch, start, rows, batch.direction, batch.next_span(layers))
        self._draft.training.append(segment)
        self._draft.trained.add(segment)
        self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self.left -= seconds
        self._before += seconds


def in_order(segments: list[Segment]) -> tuple[Segment, ...]:
    """Windows that ride forward, then losses and windows going back: the order in which a step runs them."""
    return tuple(sorted(segments, key=lambda segment: segment.direction is not Direction.KEEP))
