"""Seconds of steps of several bases: the parts of the bases after each other, and the host."""

from collections.abc import Iterable
from typing import Final

from coserve.core.plan import BasePlan, StepPlan, StepResult
from coserve.core.request import BASE
from coserve.core.sequence import Direction, MicroBatch
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import OUTLIER, CostModel, within_outliers
from coserve.schedule.features import Features, StepFeatures
from coserve.schedule.margin import Margin, share_of_steps

_MEMORY: Final = 0.05  # weight of an observation in the host's running mean


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
