"""Every policy on every traffic at every load, on predicted seconds: hundreds of requests a cell.

Traffic, jobs and bounds are the real contest's (`fitted`, `papers`); the machine is `SimulatedMachine`. All
policies of a column have the same requests, jobs and bounds, and the same seed of deviations.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final

import numpy as np

from coserve.core.request import SLO
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import ServedAdapters, Workload
from coserve_benchmarks.intervals import interval, share_interval
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings
from coserve_benchmarks.policies import papers, traffic
from coserve_benchmarks.policies.contest import Contest, Judge
from coserve_benchmarks.policies.fitted import ROOM, Alone, FittedTraffic, Make, pushed_out
from coserve_benchmarks.policies.testbed import Testbed, patience_for
from coserve_benchmarks.simulated import weighted_machine

REQUESTS: Final = 220  # of a cell
LOADS: Final = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the capacity
ALONE: Final = "no training"  # the row without jobs
FIGURES: Final = (
    "requests", "unanswered", "within", "within_low", "within_high", "training", "training_low",
    "training_high", "first_token_p50", "first_token_p99", "between_p50", "between_p99", "slowdown",
)  # fmt: skip
_BLOCKS: Final = 20  # equal parts of a load's time, for the interval of a rate
_PATIENCE: Final = 0.5  # of a load's time: what a line that has grown may take after it
_FLEX: Final = 8.0  # seconds that training may defer a request that can wait: the real contest's


class SimulatedTestbed(Testbed):
    """Runs rounds on predicted seconds. Isolation needs two machines, and is not there."""

    def __init__(self, seed: int = 0, known: int = 256, **machine: Any) -> None:
        self._seed, self._machine = seed, {"known": known, **machine}

    def run(self, policy: str, workload: Workload, patience: float | None = None) -> LoadResult:
        """See `Testbed.run`. The line of a full machine has half of the load's time to come to its end."""
        if patience is None:
            patience = patience_for(workload) + _PATIENCE * workload.seconds
        return replay(weighted_machine(policy, seed=self._seed, **self._machine), workload, patience)


@dataclass(slots=True)
class CellRunner(FittedTraffic):
    """Runs the contest of a traffic at one load; `column` has its cells."""

    load: float = 0.5
    requests: int = REQUESTS
    only: Collection[str] = ()  # policies; all where it is empty
    column: dict[str, Any] = field(default_factory=dict)

    def rate(self, make: Make, prompt: int, answer: int) -> float:
        """The load's share of the requests a second that are answered when all of them are there at once."""
        return self.load * self.saturated(make)

    def saturated(self, make: Make) -> float:
        """Requests a second of the traffic's own lengths, all there from the beginning, without training."""
        once = make(self.given(1.0), 1.0)
        burst = tuple(replace(request, at=0.0) for request in once.requests)
        load = self.testbed.alone(replace(once, requests=burst, seconds=1e-3))
        return len(burst) / (load.finished_at - load.started)

    def given(self, rate: float, slo: SLO = SLO()) -> WorkloadSettings:
        """Settings for as many requests as a cell has."""
        return replace(self.sizes.given(slo), seconds=self.requests / rate)

    @property
    def flex_patience(self) -> float:
        """See `FittedTraffic`."""
        return _FLEX

    def contest(
        self,
        workload: Workload,
        policies: Sequence[str],
        judges: dict[str, Judge],
        bounds: dict[str, str],
    ) -> Contest:
        """Runs every policy once, and the same requests without jobs."""
        judge = next(iter(judges.values()))
        peak = self._peak(workload)
        undisturbed = self.testbed.run("hybrid", replace(workload, jobs=()))
        cells = {ALONE: cell(undisturbed, undisturbed, judge)}
        for policy in dict.fromkeys((*policies, "postpone-all")):
            if self.only and policy not in self.only:
                continue
            name = _short(policy)
            cells[name] = told = cell(self.testbed.run(policy, workload), undisturbed, judge)
            print(
                f"{workload.name} at {self.load:g}: {name}: {told[1]} of {told[0]} unanswered, "
                f"{told[2]:.1%} within bounds, {told[5]:,.0f} fine-tuning tokens/s",
                file=sys.stderr,
            )
        self.column = {
            "title": workload.title,
            "scale": workload.scale,
            "rate": len(workload.requests) / workload.seconds,
            "seconds": workload.seconds,
            "peak": peak,
            "bounds": next(iter(bounds.values())),
            "cells": cells,
        }
        return Contest(workload, bounds, judges, peak)

    def _peak(self, workload: Workload) -> float:
        return self.testbed.peak(workload, 60.0)

    # The papers' own

    def fineinfer(self) -> Contest:
        """FineInfer's requests, each within some seconds of the last one, with a bound on their deferral."""
        training = TrainingSpec(batch=4, length=64)

        def make(given: WorkloadSettings, rate: float) -> Workload:
            return traffic.fineinfer(given, deferral=0.0, spread=2 / rate, prompt=224, training=training)

        rate = self.rate(make, 224, 32)
        probe = make(self.given(rate), rate)
        one = replace(probe, seconds=1e-3, requests=(replace(probe.requests[0], at=0.0),))
        load = self.testbed.alone(one)
        alone = load.finished_at - load.started
        ratio = alone / papers.THEIR_ANSWER
        batch = max(1, round(self._peak(probe) * papers.THEIR_ITERATION * ratio / training.length))
        bound = papers.BOUNDS[-1] * ratio
        late = Alone.of(self.testbed.alone(probe)).latency
        slo = SLO(deferral=bound, end_to_end=bound + max(3 * alone, ROOM * late))
        workload = traffic.fineinfer(
            self.given(rate),
            deferral=bound,
            spread=2 / rate,
            prompt=224,
            training=replace(training, batch=batch),
        )
        requests = tuple(replace(request, slo=slo) for request in workload.requests)
        return self.own(replace(workload, requests=requests), *pushed_out(bound))

    def report(self) -> Contest:
        """The multi-LoRA report's steady requests and bursts of fine-tuning."""
        adapters, training = ServedAdapters(32, 32), TrainingSpec(batch=2, length=64, rank=32)
        shape: dict[str, Any] = {"prompt": 32, "answer": 24, "adapters": adapters}

        def make(given: WorkloadSettings, rate: float) -> Workload:
            return traffic.report(
                given, every=1 / rate, tune_every=given.seconds, examples=2, training=training, **shape
            )

        rate = self.rate(make, 32, 24)
        probe = make(self.given(rate), rate)
        delay = papers.TOGETHER / rate
        batch = max(
            1, round(papers.OFFERED * 4 * delay * self._peak(probe) / training.length / papers.BATCHES)
        )
        bound = max(2 * delay, ROOM * Alone.of(self.testbed.alone(probe)).latency)
        workload = traffic.report(
            self.given(rate, SLO(end_to_end=bound)),
            every=1 / rate,
            tune_every=4 * delay,
            examples=batch * papers.BATCHES,
            training=replace(training, batch=batch),
            **shape,
        )
        return self.own(workload, *pushed_out(delay))


def cell(load: LoadResult, undisturbed: LoadResult, judge: Judge) -> list[float | None]:
    """`FIGURES` of one policy under one load: shares with their Clopper-Pearson interval over requests, rates
    with the bootstrap interval over `_BLOCKS` parts of the load's time, times of the requests that were
    answered. `undisturbed` are the same requests without training."""
    count = len(undisturbed.answers)
    answered = [answer for answer in load.answers if answer.tokens]
    within = sum(map(judge, load.answers)) / count
    rates = [load.training_rate(part / _BLOCKS, (part + 1) / _BLOCKS) for part in range(_BLOCKS)]
    pairs = zip(load.answers, undisturbed.answers, strict=True)
    slower = [ours.latency / theirs.latency for ours, theirs in pairs if ours.tokens and theirs.tokens]
    return [
        count,
        count - len(answered),
        within,
        *share_interval(within, count),
        load.training_rate(),
        *interval(np.mean, rates),
        *_ends([answer.first_token for answer in answered]),
        *_ends([gap for answer in answered for gap in answer.gaps]),
        fmean(slower) if slower else None,
    ]


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (percentile(values, 0.5), percentile(values, 0.99)) if values else (None, None)


def _short(policy: str) -> str:
    """A policy's name for a table: options that follow from the traffic are left out."""
    name = policy.partition(":")[0]
    return f"{name}, together" if "together=1" in policy else name


def traffics(traced: bool) -> Mapping[str, Callable[[CellRunner], Contest]]:
    """Traffics by name; those that replay a trace only where there is one."""
    found: dict[str, Callable[[CellRunner], Contest]] = {
        "report": CellRunner.report,
        "fineinfer": CellRunner.fineinfer,
        "flexllm": CellRunner.flexllm,
        "poisson": CellRunner.poisson,
        "bursty": CellRunner.bursty,
        "tiers": CellRunner.tiers,
        "flex": CellRunner.flex,
        "answers": CellRunner.answers,
    }
    if traced:
        found |= {"azure": CellRunner.azure, "azure-arrivals": CellRunner.azure_arrivals}
    return found
