"""Runs in real time beside simulated ones of the same requests and jobs.

Costs are fitted to the steps of some runs and to those of a calibration; errors are those of other policies
on other workloads. A machine is not equally fast in all minutes: calibrations before and after each run say
how fast it was.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import exp, log
from statistics import fmean, median, pstdev
from typing import Any, Final

from coserve.core.plan import StepPlan, StepResult
from coserve.core.request import BASE, SLO
from coserve.engine.calibrate import measure
from coserve.engine.engine import Engine
from coserve.schedule.cost import CostModel
from coserve.schedule.features import Features, StepFeatures
from coserve.schedule.scheduler import Scheduler
from coserve.simulate.intervals import percentile
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import LoadResult, replay
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import Workload
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings
from coserve_benchmarks.ours import CACHE_TOKENS, Bench
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.policies.testbed import EngineTestbed, patience_for
from coserve_benchmarks.simulation.papers.statement import Say

# Of two workloads: with prompts and examples of one length each, costs of rows, attention and answers cannot
# be told apart, and steps of long examples were predicted 1.4 times as long as they took.
SEEN: Final = (
    ("poisson", "hybrid"),
    ("varied", "hybrid"),
    ("poisson", "continuous"),
    ("varied", "idle-only"),
)
UNSEEN: Final = (
    ("bursty", "adaptive"),
    ("bursty", "hybrid"),
    ("long", "hybrid"),
    ("long", "temporal:8,grain=batch"),
    ("patient", "adaptive"),
    ("patient", "deferred:0.5"),
)
_LOAD: Final = 0.5  # of the requests that the machine answers when all are there at once
_SETTINGS: Final = ("layers", "max_positions", "row_buckets")  # that the machine sets itself
_REPEATED: Final = 10  # steps of a run for each of a calibration's, of which there are some thirty
_LONG: Final = 3.0  # standard deviations from which on a step counts as one that was disturbed


@dataclass(frozen=True, slots=True)
class Timings:
    """Figures of a run: seconds, and fine-tuning tokens a second."""

    time_per_token: float | None
    ttft_p99: float | None
    training: float

    @classmethod
    def of(cls, load: LoadResult) -> "Timings":
        """Of a load that was replayed."""
        answers = [answer for answer in load.answers if len(answer.tokens) > 1]
        if not answers:
            return cls(None, None, load.training_rate())
        each = fmean((one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) for one in answers)
        return cls(each, percentile([one.first_token for one in answers], 0.99), load.training_rate())


@dataclass(frozen=True, slots=True)
class Pair:
    """A policy on a workload, in real time and simulated; `pace` is that of the machine meanwhile
    (`Pace`)."""

    workload: str
    policy: str
    pace: float
    real: Timings
    simulated: Timings

    def error(self, name: str) -> float | None:
        """The simulated figure's relative error; None where the real one is nothing."""
        real, simulated = getattr(self.real, name), getattr(self.simulated, name)
        return None if not real or simulated is None else abs(simulated - real) / real

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        errors = {name: self.error(name) for name in asdict(self.real)}
        return {**asdict(self), "error": errors}


class StepRecorder:
    """Records the steps of a scheduler: features, the executor's seconds, and those of the loop around it."""

    def __init__(self, scheduler: Scheduler, calibrated: Sequence[tuple[Features, float]] = ()) -> None:
        """`calibrated` are synthetic steps, to which costs are fitted as well."""
        self._scheduler, self._calibrated = scheduler, calibrated
        self.samples: list[tuple[Features, float]] = []
        self.around: list[float] = []

    def paced(self, begin: int, pace: float) -> None:
        """Divides the seconds of the steps from `begin` on by the machine's `pace` meanwhile."""
        self.samples[begin:] = [(features, seconds / pace) for features, seconds in self.samples[begin:]]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records within the block."""
        scheduler, cost = self._scheduler, self._scheduler.cost
        observe, plan, apply = cost.observe, scheduler.plan, scheduler.apply
        planned: float | None = None
        executed = 0.0

        def watch_plan(now: float) -> StepPlan:
            nonlocal planned
            begun = time.perf_counter()
            if planned is not None and executed:
                self.around.append(max(begun - planned - executed, 0.0))
            planned = begun if scheduler.has_work else None
            return plan(now)

        def watch_apply(result: StepResult, now: float) -> Any:
            nonlocal planned, executed
            executed = result.seconds
            events = apply(result, now)
            if not scheduler.has_work:
                planned = None  # the next step begins when somebody comes
            return events

        def watch_observe(features: StepFeatures, result: StepResult, host: float = 0.0) -> None:
            self.samples.append((features[BASE].copy(), result.seconds))
            observe(features, result, host)

        cost.observe, scheduler.plan, scheduler.apply = watch_observe, watch_plan, watch_apply  # type: ignore[method-assign]
        try:
            yield
        finally:
            del cost.observe, scheduler.plan, scheduler.apply

    def costs(self, start: CostModel) -> CostModel:
        """A cost model fitted to the steps."""
        model = CostModel(start.weights)
        model.fit([*self.samples, *_REPEATED * [*self._calibrated]])
        return model

    def jitter(self, model: CostModel) -> Jitter:
        """Deviations of the steps from a model."""
        ratios = [
            log(seconds / max(model.predict_features(one), 1e-9)) for one, seconds in self.samples if seconds
        ]
        middle = median(ratios)
        spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
        usual = [ratio for ratio in ratios if ratio - middle <= _LONG * spread]
        longer = [ratio for ratio in ratios if ratio - middle > _LONG * spread]
        more = exp(fmean(longer) - middle) if longer else 1.0
        return Jitter(pstdev(usual), len(longer) / len(ratios), more)

    def weights(self, model: CostModel, jitter: Jitter) -> dict[str, float]:
        """A model's weights, scaled so that all steps together take as long as they did: a fit to relative
        errors is low where steps vary, as slow ones count less."""
        predicted = sum(model.predict_features(one) for one, _ in self.samples) * jitter.mean
        scale = sum(seconds for _, seconds in self.samples) / predicted
        return {name: weight * scale for name, weight in model.weights.items()}


class Pace:
    """The time that the machine takes for the steps of a calibration, over the one that it took at first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.first = self._measure()
        self._last = 1.0

    def since_last(self) -> float:
        """Calibrates again; the mean of this pace and of the one at the last call."""
        again = zip(self._measure(), self.first, strict=True)
        before, self._last = self._last, median(seconds / first for (_, seconds), (_, first) in again)
        return (before + self._last) / 2

    def _measure(self) -> list[tuple[Features, float]]:
        config = self._engine.config
        room = self._engine.executor, self._engine.base, config.page_size, config.pages
        return measure(*room, seconds=float("inf")).samples


class RealRuns:
    """Runs an engine on this machine, and its simulation."""

    def __init__(self, bench: Bench, quick: bool, say: Say = lambda text: None) -> None:
        self._bench, self._say = bench, say
        self._testbed = EngineTestbed(bench)
        self._seconds = 4.0 if quick else 30.0
        self._training = TrainingSpec(batch=4, length=128)

    def compare(self) -> list[Pair]:
        """Fits costs to the runs of `SEEN`, and compares those of `UNSEEN`."""
        engine = self._testbed.engine
        self._say("errors: the machine's capacity")
        workloads = self._workloads()
        measured = engine.scheduler.cost.first.interference
        interference = measured.inference, measured.training
        self._testbed.peak(workloads["poisson"], 2.0)  # what is made at first use
        pace = Pace(engine)
        recorder = StepRecorder(engine.scheduler, pace.first)
        with recorder.watching():
            for number, (name, policy) in enumerate(SEEN, 1):
                self._say(f"errors: {number} of {len(SEEN)} to learn from, {policy} on {name}")
                begin = len(recorder.samples)
                self._testbed.run(policy, workloads[name])
                recorder.paced(begin, pace.since_last())
        model = recorder.costs(engine.scheduler.cost.first)
        jitter = recorder.jitter(model)
        weights, host = recorder.weights(model, jitter), median(recorder.around)
        set_here = asdict(engine.scheduler.config)
        scheduler = {name: value for name, value in set_here.items() if name not in _SETTINGS}
        settings = MachineSettings(
            CACHE_TOKENS, jitter=jitter, scheduler=scheduler, known=256, interference=interference
        )
        found = []
        for number, (name, policy) in enumerate(UNSEEN, 1):
            self._say(f"errors: {number} of {len(UNSEEN)} unseen, {policy} on {name}")
            workload = workloads[name]
            real = self._testbed.run(policy, workload)
            meanwhile = pace.since_last()
            here = {feature: weight * meanwhile for feature, weight in weights.items()}
            times = WeightedTimes(here, engine.scheduler.config.layers, host=host * meanwhile)
            simulated = replay(SimulatedMachine(policy, times, settings), workload, patience_for(workload))
            found.append(Pair(name, policy, meanwhile, Timings.of(real), Timings.of(simulated)))
        self._bench.results.note("errors", self._said(recorder, jitter, host, found))
        return found

    def _said(self, recorder: StepRecorder, jitter: Jitter, host: float, found: Sequence[Pair]) -> str:
        paces = [pair.pace for pair in found]
        seen = ", ".join(f"{policy} on {workload}" for workload, policy in SEEN)
        return (
            f"costs of {len(recorder.samples)} steps of {seen}, and of a calibration's; steps deviate by "
            f"{jitter.deviation:.1%}, {jitter.share:.1%} of them take {jitter.longer:.2g} times as long; "
            f"{host * 1e3:.2g} ms a step around the executor; calibrations around the unseen runs took "
            f"{min(paces):.2f} to {max(paces):.2f} times as long as the first, and so do simulated steps"
        )

    def _workloads(self) -> dict[str, Workload]:
        vocabulary = self._bench.shape.vocabulary
        rate = _LOAD * self._capacity(vocabulary)
        bounded = SLO(first_token=1.0, between_tokens=0.25)
        given = WorkloadSettings(vocabulary, self._seconds, bounded, seed=1)
        other = replace(given, seed=2)
        patient = replace(given, seed=3, slo=SLO(end_to_end=6.0, deferral=2.0))
        training = self._training
        return {
            "poisson": traffic.poisson(given, rate=rate, training=training),
            "varied": traffic.poisson(
                replace(given, seed=5),
                rate=rate / 2,
                prompt=320,
                answer=24,
                training=replace(training, batch=2, length=512),
            ),
            "bursty": traffic.bursty(other, rate=rate, training=training),
            "long": traffic.flexllm(replace(other, seed=4), rate=rate / 2, training=training),
            "patient": traffic.poisson(patient, rate=rate / 2, prompt=64, training=training),
        }

    def _capacity(self, vocabulary: int) -> float:
        """Requests a second of 128 tokens in and 32 out, 32 at once."""
        given = WorkloadSettings(vocabulary, 4.0)
        made = traffic.poisson(given, rate=8.0, training=self._training)
        burst = tuple(replace(request, at=0.0) for request in made.requests)
        load = self._testbed.alone(replace(made, requests=burst, seconds=1e-3))
        return len(burst) / (load.finished_at - load.started)
