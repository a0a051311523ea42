"""Loads near the capacity: places for answers run out, and pieces of training outlast answers beside them.

Each scenario is one cause of requests that were late under `hybrid` or `adaptive` although the machine
without training answers them in time.
"""

from coserve.core.events import Event
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import SLO
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import SimulatedMachine
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import ServedAdapters, TimedJob, TimedRequest, Workload, training_tokens
from coserve_benchmarks.mixes import WorkloadSettings
from coserve_benchmarks.policies import traffic
from coserve_benchmarks.policies.contest import own_bounds
from coserve_benchmarks.simulated import weighted_machine

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
    load = replay(weighted_machine("hybrid", known=256), traffic.poisson(given, rate=rate), patience=60.0)
    assert load.attainment(given.slo) >= 0.98
    assert load.training_rate() > 20


def test_who_is_deferred_does_not_wait_for_more_than_there_are_places() -> None:
    """Sixteen patient requests and four places: four enter at once."""
    patient = SLO(end_to_end=30.0)
    machine = weighted_machine("adaptive", jitter=EXACT, max_running=4)
    plans: list[BasePlan] = []
    machine.executor.observe = lambda plan, result, began: plans.append(plan)
    run(machine, *(asked(0.05 * number, 8, patient) for number in range(16)))
    most = max(len(plan.inference) for plan in plans[:40])
    assert most >= 3


def test_nobody_awaits_a_piece_whose_answers_have_ended() -> None:
    """A step without answers takes until the piece under way is done, 0.2 s and more; who waits enters beside
    it. First tokens that are bounded came up to 0.23 s late, 8 of 300 answers."""
    classes = traffic.service_tiers(
        first_token=0.519, between_tokens=0.267, end_to_end=5.41, deferral=3.0, shares=traffic.SHARES
    )
    rate, count = 2.42, 240
    adapters = ServedAdapters(count=2, rank=8, exponent=1.0)
    load = traffic.tiers(WorkloadSettings(1000, count / rate), classes, rate=rate, adapters=adapters)
    machine = weighted_machine("adaptive", known=256)
    idle = []  # steps in which somebody waited and nobody was answered
    run_step, ran = machine.step, list[tuple[BasePlan, BaseResult]]()
    machine.executor.observe = lambda plan, result, began: ran.append((plan, result))

    def step(arrival: float = float("inf")) -> list[Event]:
        events, waiting = run_step(arrival), machine.scheduler.requests.waiting
        plan, result = ran[-1]
        arrived = [one for one in waiting if one.request.arrival < machine.clock() - result.seconds]
        if plan.share is not None and not plan.inference and arrived:
            idle.append(result.seconds)
        return events

    machine.step = step  # type: ignore[method-assign]
    found = replay(machine, load, patience=60.0)
    assert not idle
    assert sum(own_bounds(answer) for answer in found.answers) >= 0.985 * count
    assert found.training_rate() > 200
