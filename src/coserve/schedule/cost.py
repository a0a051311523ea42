"""Cost model: how long a plan will take, FlexLLM's latency estimate f(c, s) (section 6.2), in more detail.

The seconds of a step are a weighted sum of what is in it. The features come from the plan alone, the weights
are measured at start-up (`fit`) and corrected after every step (`observe`). All decisions about latency
bounds use this model alone; `margin` is its safety margin.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import mul
from types import MappingProxyType
from typing import Self

from coserve.core.plan import (
    InferenceSegment,
    OffloadReads,
    Plan,
    StepResult,
    TrainingSegment,
    WeightReads,
)
from coserve.core.request import BASE
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.lanes import LaneCosts
from coserve.schedule.margin import Margin, share_of_steps
from coserve.schedule.reads import OffloadCosts, ReadCosts
from coserve.schedule.segments import causal_pairs, training_segment

# What one unit of each feature is. The numbers are the seconds per unit assumed before any measurement:
# a small model on a small machine, slow rather than fast, so that first guesses err towards less training.
DEFAULT_WEIGHTS: Mapping[str, float] = {
    "step": 1e-3,  # every step once
    "forward_layers": 1e-2,  # a forward pass over the whole depth: weights are read once for all rows
    "forward_rows": 1e-4,  # a row through the whole depth
    # A pass over the whole depth that carries prompts or windows, beside `forward_layers`: decode rows alone
    # take a compiled call (`model/native_layer.py`). 7 ms of 19M parameters, of which 8 decode rows take 4.
    "prefill_layers": 0.0,
    "tail_rows": 5e-5,  # a row through the final norm and the head: sampled, or scored for prompt_logprobs
    "decode_context": 1e-7,  # a cached token read by a decode row
    "forward_attention": 1e-8,  # a (row, earlier row) pair of a prefill or a kept window, whole depth
    "adapters": 2e-4,  # a distinct adapter through the whole depth
    "backward_layers": 2e-2,  # a way back over the whole depth: jobs at the same layer share it
    "backward_rows": 3e-4,  # a row back through the whole depth
    "backward_attention": 4e-8,  # a (row, earlier row) pair on the way back, whole depth
    "loss_rows": 2e-4,  # a row's head and loss, forward and back
    "updates": 5e-3,  # an optimizer step
}
NAMES = tuple(DEFAULT_WEIGHTS)
(
    _STEP,
    _FORWARD_LAYERS,
    _FORWARD_ROWS,
    _PREFILL_LAYERS,
    _TAIL_ROWS,
    _DECODE_CONTEXT,
    _FORWARD_ATTENTION,
    _ADAPTERS,
    _BACKWARD_LAYERS,
    _BACKWARD_ROWS,
    _BACKWARD_ATTENTION,
    _LOSS_ROWS,
    _UPDATES,
) = range(len(NAMES))

# Steps of one kind share a factor of slowness relative to their measurement.
_KIND_OF = tuple(
    "backward" if name.startswith("backward") else name if name in ("loss_rows", "updates") else "forward"
    for name in NAMES
)

_BACK = (_BACKWARD_LAYERS, _BACKWARD_ROWS, _BACKWARD_ATTENTION)
_NO_PASS = (_LOSS_ROWS, _UPDATES)  # beside no reads of weights

_RIDGE = 1e-6  # per sample; keeps features that always occur together at small, equal weights
_RATE = 0.02  # share of an error that one observation corrects in the weights
_RANGE = 3.0  # how far a weight may move from what was measured, either way
_DRIFT = 0.1  # share of a logarithmic error that one observation corrects in the factors
_MEMORY = 0.05  # weight of an observation in the running error
_UNKNOWN_ERROR = 0.25  # before anything was measured
_ALL = -1  # all bits set: every layer
_NO_READS = WeightReads()
_NO_OFFLOAD_READS = OffloadReads()
_NO_RESULT = StepResult(0.0)
_NOTHING_BESIDE: Mapping[str, StepResult] = MappingProxyType({})
_OUTLIER = 4.0  # bound on the ratio of measured to predicted seconds that is learned from


class Features:
    """Features of a step, counted as its plan is built. `values` follows `NAMES`, and is of the passes
    through the engine's first base; `others` has the features of those through each of the others, by its
    id."""

    __slots__ = (
        "_adapters",
        "_back",
        "_covered",
        "_fills",
        "_prefilled",
        "_returned",
        "answers",
        "offloaded",
        "others",
        "trains",
        "values",
    )

    def __init__(self) -> None:
        self.values = [0.0] * len(NAMES)
        self.values[_STEP] = 1.0
        self.trains = self.answers = False
        self.offloaded = 0  # cached tokens that are read from slower memory
        self._covered = 0  # a bit for each layer that some forward row visits; all bits are of every depth
        self._prefilled = 0  # the same of rows that are not decode rows
        self._returned: dict[str, int] = {}  # by job, a bit for each layer that its rows going back visit
        self._back: tuple[int, ...] = ()  # bits of layers visited on each way back
        self._fills = 0  # passes over the whole depth that precede the step's own
        self._adapters: dict[str, float] = {}  # the share of the depth that rows of each pass
        self.others: dict[str, Features] = {}

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The features of a plan that has not been applied yet (only then its sampled rows are known)."""
        features = cls.of_segments(plan.inference, plan.training)
        for prefix in plan.prefixes:
            features.add_fill(prefix.tokens - prefix.rows, prefix.rows, prefix.base)
        for update in plan.updates:
            features.add_update(update.base)
        return features

    @classmethod
    def of_segments(
        cls, inference: Iterable[InferenceSegment], training: Iterable[TrainingSegment] = ()
    ) -> Self:
        """The features of a step of these segments."""
        features = cls()
        for segment in inference:
            features.add(segment)
        for window in training:
            features.add_training(window)
        return features

    def copy(self) -> "Features":
        """An independent copy of the counts."""
        twin = Features.__new__(Features)
        twin.values = self.values.copy()
        twin.trains, twin.answers = self.trains, self.answers
        twin.offloaded = self.offloaded
        twin._covered, twin._prefilled = self._covered, self._prefilled
        twin._returned = self._returned.copy()
        twin._back = self._back
        twin._fills = self._fills
        twin._adapters = self._adapters.copy()
        twin.others = {base: each.copy() for base, each in self.others.items()} if self.others else {}
        return twin

    def _of_base(self, base: str) -> "Features":
        """The features of the passes through one base."""
        if base == BASE:
            return self
        if base not in self.others:
            self.others[base] = Features()
        return self.others[base]

    @property
    def without_rows(self) -> "Features":
        """The forward passes of these features, without their rows."""
        empty = Features()
        for base in (BASE, *self.others):
            if self._of_base(base).values[_FORWARD_LAYERS]:
                empty.add_inference(0, 0, 0, None, base=base)
        return empty

    @property
    def _is_idle(self) -> bool:
        """Tells whether the first base computes nothing, as all passes are through others."""
        return bool(self.others) and not any(self.values[_STEP + 1 :])

    def as_dict(self) -> dict[str, float]:
        """The counts by name."""
        return dict(zip(NAMES, self.values, strict=True))

    def visits(self, layers: int) -> int:
        """Number of visits to layers with a bit in `layers`, forward and back."""
        there = self._fills * layers.bit_count() + (self._covered & layers).bit_count()
        return there + self.visits_back(layers)

    def visits_back(self, layers: int) -> int:
        """Number of visits to layers with a bit in `layers` on a way back."""
        return sum((way & layers).bit_count() for way in self._back)

    def add(self, segment: InferenceSegment) -> None:
        """Adds a segment of a sequence."""
        self.add_inference(
            segment.context,
            segment.length,
            segment.tail_rows,
            segment.adapter,
            segment.offloaded,
            segment.base,
        )

    def add_inference(
        self,
        start: int,
        rows: int,
        tail: int,
        adapter: str | None,
        offloaded: bool = False,
        base: str = BASE,
    ) -> None:
        """Adds `rows` rows after `start` cached ones, which are read from slower memory if `offloaded`;
        `tail` of the rows go through the head."""
        self.answers = True
        if base != BASE:
            self._of_base(base).add_inference(start, rows, tail, adapter, offloaded)
            return
        values = self.values
        values[_FORWARD_LAYERS] = 1.0 + self._fills
        self._covered = _ALL
        values[_FORWARD_ROWS] += rows
        values[_TAIL_ROWS] += tail
        self.offloaded += start * offloaded
        if rows == 1:
            values[_DECODE_CONTEXT] += start + 1
        elif rows:
            values[_FORWARD_ATTENTION] += causal_pairs(start, rows)
            values[_PREFILL_LAYERS] = 1.0 + self._fills
            self._prefilled = _ALL
        if adapter is not None:
            self._add_adapter(adapter, 1.0)

    def add_fill(self, given: int, rows: int, base: str = BASE) -> None:
        """Adds a pass of `rows` virtual tokens, behind `given` ones whose keys and values are given."""
        if base != BASE:
            self._of_base(base).add_fill(given, rows)
        elif rows:
            self._fills += 1
            self.values[_FORWARD_LAYERS] += 1.0
            self.values[_PREFILL_LAYERS] += 1.0
            self.values[_FORWARD_ROWS] += rows
            self.values[_FORWARD_ATTENTION] += causal_pairs(given, rows)

    def add_training(self, segment: TrainingSegment) -> None:
        """Adds a window of a micro-batch."""
        self.trains = True
        of_base = self if segment.base == BASE else self._of_base(segment.base)
        of_base._add_window(segment)

    def _add_window(self, segment: TrainingSegment) -> None:
        values, rows, span, depth = self.values, segment.length, segment.span, segment.layers
        if segment.direction.is_tail:
            values[_LOSS_ROWS] += rows
            return
        part = len(span) / depth
        if segment.direction is Direction.TRAIN_FORWARD:
            visited, whole = (1 << span.last) - (1 << span.first), (1 << depth) - 1
            self._covered |= visited
            self._prefilled |= visited
            values[_FORWARD_LAYERS] = (self._covered & whole).bit_count() / depth + self._fills
            values[_PREFILL_LAYERS] = (self._prefilled & whole).bit_count() / depth + self._fills
            values[_FORWARD_ROWS] += rows * part
            values[_FORWARD_ATTENTION] += segment.pairs * part
        else:
            values[_BACKWARD_LAYERS] += self._read_again(segment.job, span) / depth
            values[_BACKWARD_ROWS] += rows * part
            values[_BACKWARD_ATTENTION] += segment.pairs * part
        self._add_adapter(segment.adapter, part)

    def _read_again(self, job: str, span: Span) -> int:
        """Number of layers whose weights a further backward window of a job reads again: those that no window
        of another job passes, or that a window of its own passes already."""
        layers = (1 << span.last) - (1 << span.first)
        own, others = self._returned.get(job, 0), 0
        for other, passed in self._returned.items():
            others |= passed if other != job else 0
        self._returned[job] = own | layers
        read = layers & (own | ~others)
        self._back += (read,)
        return read.bit_count()

    def add_update(self, base: str = BASE) -> None:
        """Adds an optimizer step."""
        self.trains = True
        self._of_base(base).values[_UPDATES] += 1.0

    def _add_adapter(self, key: str, part: float) -> None:
        """Adds an adapter that rows pass for `part` of the depth; counted once for all rows of the same
        one."""
        known = self._adapters.get(key, 0.0)
        if part > known:
            self._adapters[key] = part
            self.values[_ADAPTERS] += part - known


@dataclass(frozen=True, slots=True)
class Costs:
    """Learned parameters of a cost model, as JSON types.

    `measured` and `weights` are seconds per unit of each feature, as measured and as corrected by later
    steps; `factors` are those of the kinds of work, `error` is the running error.
    """

    measured: Mapping[str, float]
    weights: Mapping[str, float]
    factors: Mapping[str, float]
    error: float
    lanes: tuple[float, float] = LaneCosts.UNKNOWN

    @property
    def is_sound(self) -> bool:
        """Tells whether names are complete and all numbers are valid costs."""
        named = (self.measured.keys(), set(NAMES)), (self.weights.keys(), set(NAMES))
        if any(found != wanted for found, wanted in (*named, (self.factors.keys(), set(_KIND_OF)))):
            return False
        costs = (*self.measured.values(), *self.weights.values(), self.error)
        return (
            all(0.0 <= cost < float("inf") for cost in costs)
            and any(self.weights.values())
            and all(1 / _OUTLIER <= factor <= _OUTLIER for factor in (*self.factors.values(), *self.lanes))
        )


class CostModel:
    """Predicts the seconds of a step: a non-negative weight for each feature times its kind's factor, or the
    time in which weights are read (`reads`), whichever is longer, and the host's own time (`host`). The
    time in which offloaded keys and values are read (`offload`) adds to that of computing.

    It is that of an engine's first base. Others have their own (`others`, by the base's id), whose seconds
    add up, as bases compute one after the other; the host's time and margins are common to all."""

    _effective: list[float]  # weight times factor, by feature

    def __init__(self, weights: Mapping[str, float] = DEFAULT_WEIGHTS) -> None:
        self.is_measured = False  # else weights are assumed
        self.error = _UNKNOWN_ERROR  # exponentially weighted mean of |predicted - taken| / taken
        self.host = 0.0  # seconds from a step's planning to its tokens that its executor does not count
        self._hosts = 0  # steps that it is known from
        self.misses = Margin()
        self.lanes = LaneCosts()
        self.reads = ReadCosts()
        self.offload = OffloadCosts()
        self.others: dict[str, CostModel] = {}
        self._start([float(weights.get(name, DEFAULT_WEIGHTS[name])) for name in NAMES])

    @property
    def weights(self) -> dict[str, float]:
        """Seconds per unit of each feature, the factor of its kind included."""
        return dict(zip(NAMES, self._effective, strict=True))

    def predict(self, plan: Plan) -> float:
        """Seconds that `plan` will take."""
        return self.predict_features(Features.of(plan))

    def predict_features(self, features: Features) -> float:
        """Seconds of a step of these features, from its planning until its tokens are there."""
        return self._executed(features) + self.host

    def predict_iteration(self, batches: Iterable[MicroBatch]) -> float:
        """Seconds of a whole optimizer step on these micro-batches: FineInfer's t_f."""
        whole, base = Features(), BASE
        for batch in batches:
            base = batch.base
            forward = training_segment(batch, 0, batch.length, Direction.TRAIN_FORWARD, Span(0, batch.layers))
            for way in batch.directions:
                whole.add_training(replace(forward, direction=way))
        whole.add_update(base)
        return self.predict_features(whole)

    @property
    def pass_seconds(self) -> float:
        """Seconds of a pass over the weights of all layers, without rows."""
        return max(self.weights["forward_layers"], self.reads.pass_seconds)

    @property
    def free_rows(self) -> int:
        """Rows that are computed while a pass reads the weights of a streamed base, to break even; 0 where it
        reads none."""
        left = self.reads.pass_seconds - self.weights["forward_layers"]
        return int(max(left, 0.0) / max(self.weights["forward_rows"], 1e-9))

    def margin(self, config: SchedulerConfig, trains: bool, tokens: int = 1) -> float:
        """Relative margin for predictions of steps with or without training. It is wide enough for answers of
        `tokens` tokens to keep a bound on each of them (`Margin`)."""
        share = share_of_steps(config.reliability, tokens)
        return min(self.misses.covering(share, trains), config.max_margin)

    def fit(self, samples: Iterable[tuple[Plan | Features, float]]) -> None:
        """Refits the weights by non-negative least squares on the relative error.

        `samples` are (plan not yet applied or features, seconds without waiting for weights). Features
        without a sample keep their weight.
        """
        rows = [(_features(work).values, seconds) for work, seconds in samples if seconds > 0]
        if not rows:
            return
        relative = [[value / seconds for value in values] for values, seconds in rows]
        found = _solve(relative)
        self._start([found.get(index, weight) for index, weight in enumerate(self._effective)])
        self.is_measured = True
        misses = [abs(self._computed(row) - 1.0) for row in relative]
        self.error = sum(misses) / len(misses)

    def observe(
        self,
        work: Plan | Features,
        seconds: float,
        host: float = 0.0,
        reads: WeightReads = _NO_READS,
        offload: OffloadReads = _NO_OFFLOAD_READS,
        beside: Mapping[str, StepResult] = _NOTHING_BESIDE,
    ) -> None:
        """Learns from one step that took its executor `seconds`, and the host `host` more. The time that it
        waited for weights teaches `reads`, that for offloaded keys and values `offload`, and the rest the
        weights of its features. `beside` are the results, in this step, of each base but the first.

        Each kind of work has a factor that follows recent steps: the machine may have become busier, or more
        activations are stored than during the measurement. A kind learns from a step in proportion to its
        share of it. Weights within a kind move slowly, by a normalised gradient step in proportion to the
        square of each contribution. They stay within a range of the measured ones, so that a long run of one
        kind of step cannot distort the costs of others.
        """
        if seconds <= 0:
            return
        features = _features(work)
        predicted = max(self._executed(features), 1e-9)
        self.error += _MEMORY * (min(abs(predicted - seconds) / seconds, 1.0) - self.error)
        taken = min(max(seconds, predicted / _OUTLIER), predicted * _OUTLIER)
        # An optimizer step alone takes three times its few milliseconds now and then; that says nothing about
        # steps with inference.
        if features.answers:
            usual = predicted + self.host
            host = min(host, max(_OUTLIER * usual - taken, 0.0))
            self.misses.observe((taken + host) / usual, features.trains)
            self._hosts += 1
            self.host += max(_MEMORY, 1 / self._hosts) * (host - self.host)
        for base, part in features.others.items():
            its = beside.get(base, _NO_RESULT)
            self.others[base]._learn(part, its.computing, its.reads, its.offload_reads)
        self._learn(features, seconds - sum(its.computing for its in beside.values()), reads, offload)

    def _learn(self, features: Features, seconds: float, reads: WeightReads, offload: OffloadReads) -> None:
        """Corrects the weights and factors by the seconds of this base's passes."""
        self.reads.observe(reads)
        self.offload.observe(features.offloaded, offload)
        if seconds <= 0 or features._is_idle:
            return
        values = features.values
        predicted = max(self._own(features), 1e-9)
        taken = min(max(seconds, predicted / _OUTLIER), predicted * _OUTLIER)
        if self.reads.layers or features.offloaded:
            predicted = max(self._computed(values), 1e-9)
            computed = max(seconds - reads.waited - offload.seconds, 0.0)
            taken = min(max(computed, predicted / _OUTLIER), predicted * _OUTLIER)
        self._correct_weights(values, taken, predicted)
        self._correct_factors(values, taken, predicted)
        self._apply_factors()

    def observe_lanes(self, plan: Plan, result: StepResult, host: float = 0.0) -> None:
        """Learns each lane's slowdown from a step with split lanes, to which the host added `host`."""
        inference, training = result.lanes
        if plan.inference and inference:
            self.misses.observe((inference + host) / max(plan.predicted, 1e-9), trains=True)
            alone = self._executed(Features.of_segments(plan.inference))
            self.lanes.observe_inference(inference / max(alone, 1e-9))
        if result.trained and training:
            alone = self._executed(Features.of_segments((), result.trained))
            self.lanes.observe_training(training / max(alone, 1e-9))

    @property
    def learned(self) -> Costs:
        """Parameters learned about the machine, without the recent prediction errors (`misses`)."""
        return Costs(
            dict(zip(NAMES, self._measured, strict=True)),
            dict(zip(NAMES, self._weights, strict=True)),
            dict(self._factors),
            self.error,
            (self.lanes.inference, self.lanes.training),
        )

    def recall(self, costs: Costs) -> None:
        """Restores parameters that another model has learned; they must be sound."""
        assert costs.is_sound, "no model has learned this"
        self._start([costs.measured[name] for name in NAMES])
        self.is_measured = True
        self._weights = [costs.weights[name] for name in NAMES]
        self._factors.update(costs.factors)
        self._apply_factors()
        self.error = costs.error
        self.lanes.start(*costs.lanes)

    def _executed(self, features: Features) -> float:
        """The executor's seconds of a step with these features, in all bases."""
        if not features.others:
            return self._own(features)
        seconds = 0.0 if features._is_idle else self._own(features)
        for base, part in features.others.items():
            seconds += self.others[base]._own(part)
        return seconds

    def _own(self, features: Features) -> float:
        """The seconds of this base's passes.

        Forward and backward are passes of their own. Where weights are read, each takes the longer of reading
        and computing: while one waits for weights, the other does not compute. Losses and updates come
        between passes.
        """
        computed = self._computed(features.values) + self.offload.seconds(features.offloaded)
        if not self.reads.layers:
            return computed
        back = sum(self._effective[index] * features.values[index] for index in _BACK)
        beside = sum(self._effective[index] * features.values[index] for index in _NO_PASS)
        visits, visits_back = (count(self.reads.layers) for count in (features.visits, features.visits_back))
        there = max(computed - back - beside, self.reads.seconds(visits - visits_back))
        return there + max(back, self.reads.seconds(visits_back)) + beside

    def _computed(self, values: list[float]) -> float:
        """Seconds of arithmetic, without waiting for weights."""
        seconds: float = sum(map(mul, self._effective, values))
        return seconds

    def _start(self, weights: list[float]) -> None:
        self._measured = weights
        self._weights = weights.copy()
        self._factors = dict.fromkeys(_KIND_OF, 1.0)
        self._effective = weights.copy()

    def _apply_factors(self) -> None:
        self._effective = [w * self._factors[kind] for w, kind in zip(self._weights, _KIND_OF, strict=True)]

    def _correct_weights(self, values: list[float], taken: float, predicted: float) -> None:
        # A weight of zero could never grow by its contribution. So each present feature is taken to
        # contribute at least a hundredth.
        parts = [max(w * v, 0.01 * taken) if v else 0.0 for w, v in zip(self._effective, values, strict=True)]
        gain = _RATE * (taken - predicted) / sum(part * part for part in parts)
        for index, (part, value) in enumerate(zip(parts, values, strict=True)):
            if value:
                moved = self._weights[index] + gain * part * part / value / self._factors[_KIND_OF[index]]
                least, most = (
                    self._measured[index] / _RANGE,
                    max(self._measured[index] * _RANGE, part / value),
                )
                self._weights[index] = min(max(moved, least), most)

    def _correct_factors(self, values: list[float], taken: float, predicted: float) -> None:
        shares = dict.fromkeys(self._factors, 0.0)
        for weight, value, kind in zip(self._effective, values, _KIND_OF, strict=True):
            shares[kind] += weight * value / predicted
        norm = sum(share * share for share in shares.values()) or 1.0
        for kind, share in shares.items():
            moved = self._factors[kind] * (taken / predicted) ** (_DRIFT * share / norm)
            self._factors[kind] = min(max(moved, 1 / _OUTLIER), _OUTLIER)


def _features(work: Plan | Features) -> Features:
    return work if isinstance(work, Features) else Features.of(work)


def _solve(rows: list[list[float]]) -> dict[int, float]:
    """Weights w >= 0 by column that minimise |rows @ w - 1|; columns of zeros are left out."""
    import numpy as np  # here: half a second to import, for first starts alone
    from scipy.optimize import nnls

    matrix = np.array(rows)
    norms = np.linalg.norm(matrix, axis=0)
    columns = np.flatnonzero(norms)
    ridge = np.sqrt(_RIDGE) * np.eye(len(columns))
    target = np.concatenate([np.ones(len(rows)), np.zeros(len(columns))])
    solution, _ = nnls(np.vstack([matrix[:, columns] / norms[columns], ridge]), target)
    return {int(j): float(weight / norms[j]) for j, weight in zip(columns, solution, strict=True)}


def added_seconds(cost: CostModel, context: int, rows: int, adapter: str | None = None) -> float:
    """Seconds that `rows` of a sequence after `context` positions add to steps."""
    with_them, without = Features(), Features()
    with_them.add_inference(context, rows, 0, adapter)
    without.add_inference(0, 0, 0, adapter)
    return cost.predict_features(with_them) - cost.predict_features(without)
