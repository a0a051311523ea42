"""Packs training into a step within its budget, by rows and layers (FlexLLM, 6.2)."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

from coserve.core.plan import OptimStep, TrainingSegment
from coserve.core.sequence import Direction, MicroBatch
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import StepFeatures
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.policies.base import Allowance
from coserve.schedule.segments import training_segment, window_pairs
from coserve.schedule.step_costs import StepCosts

_WORTH: Final = 0.99  # a larger window is awaited only where its rows cost less than this share


class TrainingPacker:
    """Adds training to a builder while the allowance lasts. `left` are its remaining seconds, `configs` are
    the settings of bases: rows of every window where these are fixed (`training_window`), rows between the
    places where windows may begin (`state_rows`)."""

    def __init__(
        self,
        builder: PlanBuilder,
        allowance: Allowance,
        cost: StepCosts,
        config: SchedulerConfig,
        configs: Mapping[str, SchedulerConfig] = MappingProxyType({}),
    ) -> None:
        self.left = allowance.seconds
        self._minimum = allowance.minimum
        self._allowance = allowance
        self._builder = builder
        self._cost = cost
        self._config, self._overlap = config, config.overlap
        self._configs = configs
        self._pairs: dict[tuple[int, int, int], int] = {}  # attended pairs, by (key, start, rows)
        self._before = (
            cost.predict_features(builder.trained) if builder.inference and builder.share is None else 0.0
        )

    def update(self, base: str, update: OptimStep) -> bool:
        """Adds an optimizer step of a job on a base, if it fits."""
        if not self._may_train(update.job):
            return False
        features = self._builder.trained.copy()
        features[base].add_update()
        seconds = self._cost.predict_features(features) - self._before
        if seconds > max(self.left, self._pop_minimum()):
            return False
        self._builder.add_update(base, update)
        self._spend(seconds)
        return True

    def window_group(self, first: MicroBatch, others: Iterable[MicroBatch]) -> bool:
        """Adds a window group: the whole windows of the first job and of as many others at the same layer as
        fit, which share each layer's pass over the weights."""
        most = self._allowance.rows
        if not most or self._allowance.job is not None or self._fixed(first.base) is not None:
            return False
        most = min(most, self._config.reserved_rows)
        if first.direction.is_tail or any(not s.direction.is_tail for s in self._builder.training):
            return False
        chosen, rows = [first], first.rows_left
        for batch in others:
            if self._is_beside(chosen, batch) and rows + batch.rows_left <= most:
                chosen.append(batch)
                rows += batch.rows_left
        least = self._least_layers(first)
        while len(chosen) > 1 and (layers := self._layers(chosen, most, self.left)) < least:
            chosen.pop()
        if len(chosen) == 1 or rows > most:
            return False
        self._minimum = 0.0
        for batch in chosen:
            self._add(batch, most, layers)
        if not self._builder.inference:  # a group stays at one layer: the rest of the time is not filled
            self.left = 0.0
        return True

    def _is_beside(self, chosen: Sequence[MicroBatch], other: MicroBatch) -> bool:
        """Tells whether `other` belongs to another job, with the same base, direction and layer."""
        first = chosen[0]
        if other.base != first.base or other.job in (batch.job for batch in chosen):
            return False
        return other.direction is first.direction and other.next_span(1) == first.next_span(1)

    def has(self, batch: MicroBatch) -> bool:
        """Tells whether the step has a window of this micro-batch."""
        return any(segment.key == batch.key for segment in self._builder.training)

    def window(self, batch: MicroBatch) -> bool:
        """Adds the next window of a micro-batch: as much as fits, or its smallest part within the minimum."""
        if self._allowance.rows == 0 or not self._may_train(batch.job):
            return False
        minimum, sizes, least = self._pop_minimum(), self._sizes(batch), self._least_layers(batch)
        # The last stage of a pipeline alone has the tail, and all others wait for it.
        left = self._overlap.interval(self.left) if batch.direction.is_tail else self.left
        chosen = self._largest(batch, sizes, left)
        if chosen is None and self._seconds([batch], sizes[-1], least) <= minimum:
            chosen = sizes[-1], least
        if self._waits(batch, sizes, chosen):
            self.left = 0.0
            return False
        if chosen is None:
            return False
        self._add(batch, *chosen)
        return True

    def _may_train(self, job: str) -> bool:
        return self._allowance.job in (None, job)

    def _pop_minimum(self) -> float:
        """Returns the minimum once: it is for the first window only."""
        minimum, self._minimum = self._minimum, 0.0
        return minimum

    def _fixed(self, base: str) -> int | None:
        """Rows of every window of a base, None where they are free."""
        return self._configs.get(base, self._config).training_window

    def _sizes(self, batch: MicroBatch) -> list[int]:
        """Row counts that the next window may have, largest first; a paused window can be cut to any of
        them."""
        sizes, every = self._free_sizes(batch), self._configs.get(batch.base, self._config).state_rows
        if every is None or batch.direction.is_tail or self._fixed(batch.base) is not None:
            return sizes
        return list(dict.fromkeys(_between_states(batch, rows, every) for rows in sizes))

    def _free_sizes(self, batch: MicroBatch) -> list[int]:
        """Row counts of the next window by what they cost alone."""
        # A row's head and loss may take as long as several of its layers; those of a pipeline's last stage.
        share = 4 if batch.direction.is_tail and self._overlap.cuts_layers else 1
        if (fixed := self._fixed(batch.base)) is not None:
            window = max(1, fixed // share)
            if batch.direction is Direction.BACKWARD:  # from the right, between the same rows as forward
                return [(batch.rows_left - 1) % window + 1]
            return [min(window, batch.rows_left)]
        most, least = self._allowance.rows, max(1, self._config.min_training_rows // share)
        if most is None:
            return [batch.rows_left]
        if self._allowance.arrivals is not None:
            is_tail = batch.direction.is_tail  # it is not abandoned, and is computed in chunks anyway
            most = max(self._config.reserved_rows // share, least) if is_tail else self._cheapest(batch, most)
        # A window that stays whole is worth more than filling the rest of a step: see `_largest`. Parts of a
        # loss share only the head.
        whole = not self._allowance.cut and not batch.direction.is_tail and self._overlap.cuts_layers
        is_undisturbed = not self._builder.inference or self._allowance.abandons
        if whole or (self._builder.training and is_undisturbed):
            return [min(most, batch.rows_left)]
        ladder = [most]
        while ladder[-1] > least:
            ladder.append(max(ladder[-1] // 2, least))
        return list(dict.fromkeys(min(rows, batch.rows_left) for rows in ladder))

    def _cheapest(self, batch: MicroBatch, most: int) -> int:
        """Rows, at most `most`, of a window of which arrivals abandon a layer.

        More rows read the weights less often, and lose more with each arrival, which abandons the layer under
        way: half of its time on average. A window that has begun is not cut.
        """
        taken = sum(segment.length for segment in self._builder.training)
        whole = min(max(most - taken, self._config.reserved_rows), batch.rows_left)
        sizes = [whole]
        while not batch.is_paused and sizes[-1] // 2 >= self._config.min_training_rows:
            sizes.append(sizes[-1] // 2)
        segment, arrivals = self._segment(batch, whole, 1), self._allowance.arrivals or 0.0
        prices = {rows: self._price(batch.base, segment, rows) for rows in sizes}
        return min(sizes, key=lambda rows: prices[rows] * (1 + arrivals * rows * prices[rows] / 2))

    def _largest(self, batch: MicroBatch, sizes: Iterable[int], budget: float) -> tuple[int, int] | None:
        """(rows, layers) within `budget`: as many rows as get through one layer, then as many layers.

        Fewer rows may fill the budget better, but each part of a cut window reads the weights of all
        remaining layers again.
        """
        for rows in sizes:
            layers = self._layers([batch], rows, budget)
            if layers >= self._least_layers(batch):
                return rows, layers
        return None

    def _least_layers(self, batch: MicroBatch) -> int:
        """Fewest layers that the next window passes in one plan."""
        return 1 if self._overlap.cuts_layers else len(batch.next_span(batch.layers))

    def _waits(self, batch: MicroBatch, sizes: Iterable[int], chosen: tuple[int, int] | None) -> bool:
        """Tells whether the step leaves its time for a larger window, whose rows are cheaper.

        Fused windows are cut to each step. Interleaved ones wait: steps without training go on until `coming`
        seconds bear a layer of a larger window. The price of a row is its arithmetic, and its share of
        reading the layer's weights. A cut window stays cut, so the weights of all layers to come are read for
        fewer rows.
        """
        most = self._overlap.saved(min(self._allowance.coming, self._config.quantum_with_inference))
        larger = [rows for rows in sizes if chosen is None or rows > chosen[0]]
        bearable = [rows for rows in larger if most and self._seconds([batch], rows, 1) <= most]
        if not bearable or chosen is None:
            return bool(bearable)
        whole = self._segment(batch, bearable[0], 1)
        price = partial(self._price, batch.base, whole)
        return price(whole.length) < _WORTH * price(chosen[0])

    def _price(self, base: str, whole: TrainingSegment, rows: int) -> float:
        """Mean seconds of a row in a window of `rows` rows that passes a layer of a base alone."""
        features = StepFeatures()
        step = self._cost.predict_features(features)
        features[base].add_training(replace(whole, length=rows, pairs=whole.pairs * rows // whole.length))
        return (self._cost.predict_features(features) - step) / rows

    def _layers(self, batches: Sequence[MicroBatch], rows: int, budget: float) -> int:
        """Most layers of windows of at most `rows` rows, all at one layer, that fit into `budget`."""
        layers = range(1, len(batches[0].next_span(batches[0].layers)) + 1)
        return bisect_right(layers, budget, key=partial(self._seconds, batches, rows))

    def _seconds(self, batches: Iterable[MicroBatch], rows: int, layers: int) -> float:
        """Seconds that a window of each micro-batch would add to the step."""
        features = self._builder.trained.copy()
        for batch in batches:
            segment = self._segment(batch, rows, layers)
            features[batch.base].add_training(segment, self._builder.parts_windows)
        return self._cost.predict_features(features) - self._before

    def _add(self, batch: MicroBatch, rows: int, layers: int) -> None:
        seconds = self._seconds([batch], rows, layers)
        segment = self._segment(batch, rows, layers)
        self._builder.add_training(batch, segment)
        self._spend(seconds)

    def _segment(self, batch: MicroBatch, rows: int, layers: int) -> TrainingSegment:
        """The next window, of at most `rows` rows through at most `layers` layers."""
        start, rows = batch.next_window(rows)
        window = batch.key, start, rows
        if window not in self._pairs:
            self._pairs[window] = window_pairs(batch, start, rows)
        span = batch.next_span(layers)
        return training_segment(batch, start, rows, batch.direction, span, self._pairs[window])

    def _spend(self, seconds: float) -> None:
        self.left -= seconds
        self._before += seconds


def _between_states(batch: MicroBatch, most: int, every: int) -> int:
    """Rows of the next window, at most `most` where these reach a multiple of `every`, so that the window
    behind it on the same way begins there. All that are left are always possible."""
    start, rows = batch.next_window(most)
    if rows == batch.rows_left:
        return rows
    stop = start + rows
    if batch.direction is Direction.BACKWARD:
        begin = -(-start // every) * every
        return stop - (begin if begin < stop else max((stop - 1) // every * every, stop - batch.rows_left))
    end = stop // every * every
    return (end if end > start else min((start // every + 1) * every, start + batch.rows_left)) - start


def in_order(segments: Iterable[TrainingSegment]) -> tuple[TrainingSegment, ...]:
    """Orders segments as a step runs them: forward windows, then losses and backward windows."""
    return tuple(sorted(segments, key=lambda segment: segment.direction is not Direction.TRAIN_FORWARD))
