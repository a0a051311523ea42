"""Seconds of steps of several bases: the parts of the bases after each other, and the host."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from typing import Final, Self

from coserve.core.plan import BasePlan, StepPlan, StepResult
from coserve.core.request import BASE
from coserve.core.sequence import Direction, MicroBatch
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import OUTLIER, CostModel, within_outliers
from coserve.schedule.features import Features, StepFeatures

WINDOW: Final = 256  # recent steps: some seconds, so that a machine that becomes busy is noticed at once
HISTORY: Final = 1024  # recent steps of a kind of which the longest is kept
_BODY: Final = 0.9  # share of steps below the threshold of the tail; the excess of the rest gives its slope
_FEWEST: Final = 16  # steps before a quantile means anything
_UNKNOWN: Final = 0.5  # margin until then
# Seconds by which a system holds up a GPU's host so seldom that the steps so far need not show it: 2.8 ms in
# one step of a load, on an idle machine, made each answer under way late at 20 ms a token.
RARE_DELAY: Final = 3.5e-3
_AT_MOST: Final = 0.2  # of a bound
LONGEST: Final = 256  # tokens of an answer that count; the chance of a single one would become too small
_MEMORY: Final = 0.05  # weight of an observation in the host's running mean


class Margin:
    """Relative prediction errors of recent steps, and the margin that covers nearly all of them.

    Steps that train have larger errors, so each kind has its own. A kind with few recent steps uses the
    errors of all: otherwise training that was cut back on a busy machine would never get the steps that show
    that the machine is free again.

    Events rarer than one in `WINDOW` steps, such as another process that gets the processor, are not part of
    the extrapolated tail. Where so rare a step counts, the margin is at least the longest of the last
    `HISTORY` steps.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[bool, float]] = deque(maxlen=WINDOW)
        self._histories = {kind: deque[float](maxlen=HISTORY) for kind in (False, True)}
        self._tails: dict[bool, tuple[_Tail, float]] = {}  # of recent steps, and the longest one, by kind

    def observe(self, ratio: float, trains: bool) -> None:
        """Records one step's measured over its predicted time."""
        self._newest.append((trains, ratio))
        self._histories[trains].append(ratio)
        self._tails.clear()

    def covering(self, share: float, trains: bool) -> float:
        """Relative margin within which `share` of such steps stay."""
        if len(self._newest) < _FEWEST:
            return _UNKNOWN
        if share < _BODY:
            return max(quantile(self._alike(trains), share) - 1.0, 0.0)
        if trains not in self._tails:
            self._tails[trains] = _Tail.of(self._alike(trains), _BODY), self._longest(trains)
        tail, longest = self._tails[trains]
        is_rare = (1.0 - share) * WINDOW < 1.0
        return max(tail.quantile(share) - 1.0, longest - 1.0 if is_rare else 0.0, 0.0)

    def _alike(self, trains: bool) -> list[float]:
        alike = [ratio for kind, ratio in self._newest if kind is trains]
        return alike if len(alike) >= _FEWEST else [ratio for _, ratio in self._newest]

    def _longest(self, trains: bool) -> float:
        own = self._histories[trains]
        return max(own if len(own) >= WINDOW else chain(*self._histories.values()))


def left_of(seconds: float, bound: float, margin: float, usual: float, delay: float) -> float:
    """The part of `seconds`, which a bound on each token leaves, that steps may be predicted to take: without
    the relative `margin` of an answer's steps, or without a rare `delay` of the host and the `usual` margin
    of one step, whichever leaves less."""
    left = seconds / (1 + margin)
    return min(left, (seconds - min(delay, _AT_MOST * bound)) / (1 + usual)) if delay else left


def share_of_steps(reliability: float, tokens: int) -> float:
    """Share of steps that must keep a bound if `reliability` of answers of `tokens` tokens keep it each time.

    Steps late one by one at random: 0.5 % of them make 15 % of answers of 32 tokens late.
    """
    return 1.0 - (1.0 - reliability) / min(max(tokens, 1), LONGEST)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The upper end of a distribution: a share `beyond` exceeds `threshold`, by `excess` on average."""

    threshold: float
    excess: float
    beyond: float

    @classmethod
    def of(cls, values: Sequence[float], body: float) -> Self:
        ordered = sorted(values)
        usual = min(int(len(ordered) * body), len(ordered) - 1)
        threshold, beyond = ordered[max(usual - 1, 0)], ordered[usual:]
        return cls(threshold, sum(beyond) / len(beyond) - threshold, len(beyond) / len(ordered))

    def quantile(self, share: float) -> float:
        """Quantile at `share` of the distribution, at least the threshold."""
        return self.threshold + self.excess * max(log(self.beyond / max(1.0 - share, 1e-9)), 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """Upper quantile of `values`, with an exponential tail above a threshold, so that few samples suffice.

    Rare long steps decide whether whole answers keep their bound, so the tail is extrapolated. Excesses over
    a high threshold are nearly exponential (Pickands; Balkema and de Haan), and their mean is known better
    than their maximum.
    """
    return _Tail.of(values, min(_BODY, share)).quantile(share)


class StepCosts:
    """Predicts the seconds of steps, from their planning until their tokens are there: those of each base
    (`bases`, by id), which compute one after the other, and the host's own time (`host`). All decisions about
    latency bounds use these predictions; `margin` is their safety margin."""

    def __init__(self, first: CostModel) -> None:
        """`first` is the cost model of the first base."""
        self.bases = {BASE: first}
        self.first = first
        self.host = 0.0  # seconds from a step's planning to its tokens that its executors do not count
        self.misses = Margin()
        self._hosts = 0  # steps that `host` is known from

    def predict(self, plan: StepPlan) -> float:
        """Seconds that `plan` will take."""
        return self.predict_features(StepFeatures.of(plan))

    def predict_features(self, features: StepFeatures) -> float:
        """Seconds of a step of these features."""
        return self._executed(features) + self.host

    def predict_iteration(self, base: str, batches: Iterable[MicroBatch]) -> float:
        """Seconds of a whole optimizer step on these micro-batches of a base, as one step without answers."""
        return self.bases[base].predict_iteration(batches) + self.host

    @property
    def error(self) -> float:
        """The largest running error of the bases' models."""
        return max(model.error for model in self.bases.values())

    def margin(self, config: SchedulerConfig, trains: bool, tokens: int = 1) -> float:
        """Relative margin for predictions of steps with or without training. It is wide enough for answers of
        `tokens` tokens to keep a bound on each of them (`Margin`)."""
        share = share_of_steps(config.reliability, tokens)
        return min(self.misses.covering(share, trains), config.max_margin)

    def observe(self, features: StepFeatures, result: StepResult, host: float = 0.0) -> None:
        """Learns from the result of one step of these features, to which the host added `host` seconds. Each
        base's model learns from its part's own seconds."""
        seconds = result.seconds
        if seconds <= 0:
            return
        # An optimizer step alone takes three times its few milliseconds now and then; that says nothing about
        # steps with inference.
        if features.answers:
            predicted = max(self._executed(features), 1e-9)
            taken, usual = within_outliers(seconds, predicted), predicted + self.host
            host = min(host, max(OUTLIER * usual - taken, 0.0))
            self.misses.observe((taken + host) / usual, features.trains)
            self._hosts += 1
            self.host += max(_MEMORY, 1 / self._hosts) * (host - self.host)
        for base, part in features.items():
            its = result.bases[base]
            returned = {one.job for one in its.trained if one.direction is Direction.BACKWARD}
            self.bases[base].launched -= returned
            self.bases[base].launched |= its.launched_jobs
            self.bases[base].observe(part, its.seconds, its.reads, its.offload_reads, its.launched)

    def observe_beside(self, plan: StepPlan, result: StepResult, host: float = 0.0) -> None:
        """Learns the interference from a step of one base with a share, to which the host added `host`."""
        part, its = plan.only, result.only
        inference, training = its.stream_seconds
        if part.inference and inference:
            self.misses.observe((inference + host) / max(part.predicted, 1e-9), trains=True)
            alone = self.first.predict(BasePlan(inference=part.inference))
            self.first.interference.observe_inference(inference / max(alone, 1e-9))
        if its.trained and training:
            alone = self.first.predict_features(Features.of_segments((), its.trained))
            self.first.interference.observe_training(training / max(alone, 1e-9))

    def _executed(self, features: StepFeatures) -> float:
        """The executors' seconds of a step; a step without rows takes what one of the first base does."""
        if not features:
            return self.first.predict_features(Features())
        return sum(self.bases[base].predict_features(part) for base, part in features.items())
