"""Loads near the capacity: places for answers run out, and pieces of training outlast answers beside them.

Each scenario is one cause of requests that were late under `hybrid` or `adaptive` although the machine
without training answers them in time.
"""

import pytest

from coserve.core.request import SLO
from coserve.workload.mixes import WorkloadSettings
from coserve.workload.requests import TimedJob, TimedRequest, Workload, training_tokens
from coserve_benchmarks.drive import LoadResult, replay
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.simulated import Jitter, SimulatedMachine

EXACT = Jitter(deviation=0.0, share=0.0)
JOB = TimedJob(0.0, "job", tuple(training_tokens([512] * 8, 1000)), 4, epochs=100_000)


def asked(at: float, answer: int, slo: SLO = SLO(), prompt: int = 16) -> TimedRequest:
    return TimedRequest(at, tuple(range(prompt)), answer, slo=slo)


def run(machine: SimulatedMachine, *requests: TimedRequest, job: TimedJob = JOB) -> LoadResult:
    return replay(machine, Workload("w", "", 1.0, requests, (job,)), patience=60.0)


def test_training_leaves_places_for_who_comes() -> None:
    """At the capacity: bounds between tokens bear steps five times as long, with which answers take all 64
    places; 0.51 of the requests had their first token in time."""
    rate, count = 9.75, 240
    given = WorkloadSettings(1000, count / rate, SLO(first_token=1.88, between_tokens=1.06))
    load = replay(SimulatedMachine("hybrid", known=256), traffic.poisson(given, rate=rate), patience=60.0)
    assert load.attainment(given.slo) >= 0.98
    assert load.training_rate() > 20


def test_who_is_deferred_does_not_wait_for_more_than_there_are_places() -> None:
    """Sixteen patient requests and four places: four enter at once."""
    patient = SLO(end_to_end=30.0)
    machine = SimulatedMachine("adaptive", jitter=EXACT, max_running=4)
    run(machine, *(asked(0.05 * number, 8, patient) for number in range(16)))
    most = max(len(plan.inference) for plan in machine.executor.plans[:40])
    assert most >= 3


@pytest.mark.parametrize("waiting", [1, 3])
def test_nobody_awaits_a_piece_whose_answers_have_ended(waiting: int) -> None:
    """A step without answers takes until the piece under way is done: who waits enters beside it, the most
    urgent alone."""
    slo = SLO(first_token=1.2, between_tokens=1.0)
    machine = SimulatedMachine("adaptive", jitter=EXACT)
    late = [asked(2.0 + 0.05 * number, 8, slo, prompt=128) for number in range(waiting)]
    load = run(machine, *(asked(0.1 * number, 12, slo, prompt=64) for number in range(16)), *late)
    assert any(plan.split is not None for plan in machine.executor.plans), "a lane was used"
    empty = [
        result.seconds
        for plan, result in zip(machine.executor.plans, machine.executor.results, strict=True)
        if plan.split is not None and not plan.inference and not plan.training
    ]
    assert not empty or max(empty) < 0.05
    assert load.attainment(slo) == 1.0
