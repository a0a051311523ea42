"""Cost model: how long a part of a plan will take, FlexLLM's latency estimate f(c, s) (section 6.2), in more
detail.

The seconds of a part are a weighted sum of what is in it (`schedule.features`). The features come from the
plan alone, the weights are measured at start-up (`fit`) and corrected after every step (`observe`). Steps of
several bases: `schedule.step_costs`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import mul
from typing import Final

from coserve.core.plan import BasePlan, OffloadReads, Passes, WeightReads
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.schedule.features import DEFAULT_WEIGHTS, NAMES, Features
from coserve.schedule.reads import OffloadCosts, ReadCosts
from coserve.schedule.segments import training_segment

_NEW_SHARE: Final = 0.05  # weight of one step in the running mean
_MOST_RATIO: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from
_NO_PASS = ("loss_rows", "updates")  # beside no reads of weights
_BACK = ("backward_layers", "backward_rows", "backward_wide_rows", "backward_attention")
# Steps of one kind share a factor of slowness relative to their measurement.
_KIND_OF = {
    name: "backward" if name.startswith("backward") else name if name in _NO_PASS else "forward"
    for name in NAMES
}

_RIDGE = 1e-6  # per sample; keeps features that always occur together at small, equal weights
_RATE = 0.02  # share of an error that one observation corrects in the weights
_RANGE = 3.0  # how far a weight may move from what was measured, either way
_DRIFT = 0.1  # share of a logarithmic error that one observation corrects in the factors
_MEMORY = 0.05  # weight of an observation in the running error
_UNKNOWN_ERROR = 0.25  # before anything was measured
_NO_READS = WeightReads()
_NO_OFFLOAD_READS = OffloadReads()
OUTLIER: Final = 4.0  # bound on the ratio of measured to predicted seconds that is learned from


class Interference:
    """Factors on what the cost model predicts, learned from steps in which both ran.

    An even split of everything gives two. Work that cannot use a whole machine (small products, the overhead
    between them) is slowed less, so the initial factors are a little lower.
    """

    UNKNOWN: Final = (1.8, 1.8)

    def __init__(self) -> None:
        self.inference, self.training = self.UNKNOWN

    def start(self, inference: float, training: float) -> None:
        """Sets measured factors."""
        self.inference, self.training = _within(inference), _within(training)

    @property
    def gain(self) -> float:
        """Relative throughput gain of both side by side over one after the other."""
        return 1 / self.inference + 1 / self.training - 1

    def observe_inference(self, factor: float) -> None:
        """Records the slowdown of a step's answers beside training."""
        self.inference += _NEW_SHARE * (_within(factor) - self.inference)

    def observe_training(self, factor: float) -> None:
        """Records the slowdown of training beside answers."""
        self.training += _NEW_SHARE * (_within(factor) - self.training)


def _within(factor: float) -> float:
    return min(max(factor, 1 / _MOST_RATIO), _MOST_RATIO)


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
    interference: tuple[float, float] = Interference.UNKNOWN

    @property
    def is_sound(self) -> bool:
        """Tells whether names are complete and all numbers are valid costs."""
        named = (self.measured.keys(), set(NAMES)), (self.weights.keys(), set(NAMES))
        if any(found != wanted for found, wanted in (*named, (self.factors.keys(), set(_KIND_OF.values())))):
            return False
        costs = (*self.measured.values(), *self.weights.values(), self.error)
        return (
            all(0.0 <= cost < float("inf") for cost in costs)
            and any(self.weights.values())
            and all(
                1 / OUTLIER <= factor <= OUTLIER for factor in (*self.factors.values(), *self.interference)
            )
        )


class CostModel:
    """Predicts the executor's seconds of one base's part of a step: a non-negative weight for each feature
    times its kind's factor, or the time in which weights are read (`reads`), whichever is longer. The time in
    which offloaded keys and values are read (`offload`) adds to that of computing."""

    _effective: dict[str, float]  # weight times factor, by feature

    def __init__(self, weights: Mapping[str, float] = DEFAULT_WEIGHTS) -> None:
        self.is_measured = False  # else weights are assumed
        self.graphs = False  # whether rows that share no pass with others' are replayed
        self.launched: set[str] = set()  # jobs whose windows no graph had when they last went back
        self.error = _UNKNOWN_ERROR  # exponentially weighted mean of |predicted - taken| / taken
        self.interference = Interference()
        self.reads = ReadCosts()
        self.offload = OffloadCosts()
        self._start({name: float(weights.get(name, DEFAULT_WEIGHTS[name])) for name in NAMES})

    @property
    def weights(self) -> dict[str, float]:
        """Seconds per unit of each feature, the factor of its kind included."""
        return self._effective.copy()

    def predict(self, plan: BasePlan) -> float:
        """Seconds that `plan` will take."""
        return self.predict_features(Features.of(plan))

    def predict_features(self, features: Features) -> float:
        """Seconds of a part of these features, whose forward rows share passes as `passes` says."""
        ways = features.ways(self.graphs)
        if len(ways) == 1:  # of most steps, and many of them are weighed in each
            return self._seconds(features, ways[0])
        return min(self._seconds(features, way) for way in ways)

    def passes(self, features: Features) -> Passes:
        """The passes in which a part of these features takes the least time, and the fewest of them."""
        return min(features.ways(self.graphs), key=lambda way: self._seconds(features, way))

    def _seconds(self, features: Features, passes: Passes) -> float:
        """Seconds of a part whose forward rows have these passes.

        Forward and backward are passes of their own. Where weights are read, each takes the longer of reading
        and computing: while one waits for weights, the other does not compute. Losses and updates come
        between passes.
        """
        values = features.counted(passes, self.graphs, self.launched)
        computed = self._computed(values) + self.offload.seconds(features.offloaded)
        if not self.reads.layers:
            return computed
        back = sum(self._effective[name] * values[name] for name in _BACK)
        beside = sum(self._effective[name] * values[name] for name in _NO_PASS)
        layers = self.reads.layers
        visits, visits_back = features.visits(layers, passes), features.visits_back(layers)
        there = max(computed - back - beside, self.reads.seconds(visits - visits_back))
        return there + max(back, self.reads.seconds(visits_back)) + beside

    def predict_iteration(self, batches: Iterable[MicroBatch]) -> float:
        """Seconds of a whole optimizer step on these micro-batches: FineInfer's t_f."""
        whole = Features()
        for batch in batches:
            forward = training_segment(batch, 0, batch.length, Direction.TRAIN_FORWARD, Span(0, batch.layers))
            for way in batch.directions:
                whole.add_training(replace(forward, direction=way))
        whole.add_update()
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
        return int(max(left, 0.0) / max(self.weights["window_rows"], 1e-9))

    def fit(self, samples: Iterable[tuple[BasePlan | Features, float]]) -> None:
        """Refits the weights by non-negative least squares on the relative error.

        `samples` are (plan not yet applied or features, seconds without waiting for weights). Features
        without a sample keep their weight.
        """
        rows = [(self._values(_features(work)), seconds) for work, seconds in samples if seconds > 0]
        if not rows:
            return
        relative = [[value / seconds for value in values.values()] for values, seconds in rows]
        found = _solve(relative)
        self._start({name: found.get(place, self._effective[name]) for place, name in enumerate(NAMES)})
        self.is_measured = True
        misses = [abs(self._computed(values) / seconds - 1.0) for values, seconds in rows]
        self.error = sum(misses) / len(misses)

    def observe(
        self,
        work: BasePlan | Features,
        seconds: float,
        reads: WeightReads = _NO_READS,
        offload: OffloadReads = _NO_OFFLOAD_READS,
        launched: bool = False,
    ) -> None:
        """Learns from a part that took its executor `seconds`. The time that it waited for weights teaches
        `reads`, that for offloaded keys and values `offload`, and the rest the weights of its features: those
        of decode rows that were `launched` where it was planned to replay them.

        Each kind of work has a factor that follows recent steps: the machine may have become busier, or more
        activations are stored than during the measurement. A kind learns from a step in proportion to its
        share of it. Weights within a kind move slowly, by a normalised gradient step in proportion to the
        square of each contribution. They stay within a range of the measured ones, so that a long run of one
        kind of step cannot distort the costs of others.
        """
        features = _features(work).launched if launched else _features(work)
        values = self._values(features)
        self.reads.observe(reads)
        self.offload.observe(features.offloaded, offload)
        if seconds <= 0:
            return
        predicted = max(self.predict_features(features), 1e-9)
        self.error += _MEMORY * (min(abs(predicted - seconds) / seconds, 1.0) - self.error)
        taken = within_outliers(seconds, predicted)
        if self.reads.layers or features.offloaded:
            predicted = max(self._computed(values), 1e-9)
            taken = within_outliers(max(seconds - reads.waited - offload.seconds, 0.0), predicted)
        self._correct_weights(values, taken, predicted)
        self._correct_factors(values, taken, predicted)
        self._apply_factors()

    @property
    def learned(self) -> Costs:
        """Parameters learned about the machine, without the recent prediction errors (`misses`)."""
        return Costs(
            self._measured.copy(),
            self._weights.copy(),
            self._factors.copy(),
            self.error,
            (self.interference.inference, self.interference.training),
        )

    def recall(self, costs: Costs) -> None:
        """Restores parameters that another model has learned; they must be sound."""
        assert costs.is_sound, "no model has learned this"
        self._start({name: costs.measured[name] for name in NAMES})
        self.is_measured = True
        self._weights = {name: costs.weights[name] for name in NAMES}
        self._factors.update(costs.factors)
        self._apply_factors()
        self.error = costs.error
        self.interference.start(*costs.interference)

    def _values(self, features: Features) -> dict[str, float]:
        """The counts of a part, by the passes that it has, or would be planned with."""
        return features.counted(self.passes(features), self.graphs, self.launched)

    def _computed(self, values: Mapping[str, float]) -> float:
        """Seconds of arithmetic, without waiting for weights; both mappings have the order of `NAMES`."""
        seconds: float = sum(map(mul, self._effective.values(), values.values()))
        return seconds

    def _start(self, weights: dict[str, float]) -> None:
        self._measured = weights
        self._weights = weights.copy()
        self._factors = dict.fromkeys(_KIND_OF.values(), 1.0)
        self._effective = weights.copy()

    def _apply_factors(self) -> None:
        self._effective = {name: w * self._factors[_KIND_OF[name]] for name, w in self._weights.items()}

    def _correct_weights(self, values: dict[str, float], taken: float, predicted: float) -> None:
        # A weight of zero could never grow by its contribution. So each present feature is taken to
        # contribute at least a hundredth.
        present = {name: value for name, value in values.items() if value}
        parts = {name: max(self._effective[name] * value, 0.01 * taken) for name, value in present.items()}
        gain = _RATE * (taken - predicted) / sum(part * part for part in parts.values())
        for name, part in parts.items():
            moved = self._weights[name] + gain * part * part / values[name] / self._factors[_KIND_OF[name]]
            most = max(self._measured[name] * _RANGE, part / values[name])
            self._weights[name] = min(max(moved, self._measured[name] / _RANGE), most)

    def _correct_factors(self, values: dict[str, float], taken: float, predicted: float) -> None:
        shares = dict.fromkeys(self._factors, 0.0)
        for name, value in values.items():
            shares[_KIND_OF[name]] += self._effective[name] * value / predicted
        norm = sum(share * share for share in shares.values()) or 1.0
        for kind, share in shares.items():
            moved = self._factors[kind] * (taken / predicted) ** (_DRIFT * share / norm)
            self._factors[kind] = min(max(moved, 1 / OUTLIER), OUTLIER)


def within_outliers(seconds: float, predicted: float) -> float:
    """Measured seconds, at most so far from what was predicted as is learned from."""
    return min(max(seconds, predicted / OUTLIER), predicted * OUTLIER)


def _features(work: BasePlan | Features) -> Features:
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
