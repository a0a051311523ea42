"""Fleets: routing, and that one machine behind a router does what it does alone."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from coserve.core.request import SLO
from coserve.core.sequence import Sequence
from coserve.errors import ConfigError
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.simulate.fleet import Answered, Fleet, LeastLoaded, RoundRobin, make_router
from coserve.simulate.intervals import percentile
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import next_pressing, replay
from coserve.simulate.sweep import figures_of
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import TimedJob, TimedRequest, Workload, poisson_requests

TIMES = WeightedTimes(DEFAULT_WEIGHTS, 4)
JOB = TimedJob(0.0, "job", ((0,) * 64,) * 8, 4, epochs=1000)


def machine(seed: int = 0, policy: str = "hybrid", **scheduler: object) -> SimulatedMachine:
    settings = MachineSettings(jitter=Jitter(0.0, 0.0), scheduler={"interruptible": True, **scheduler})
    return SimulatedMachine(policy, TIMES, settings, seed)


@pytest.mark.parametrize("policy", ["hybrid", "temporal:3,grain=batch", "deferred:0.2"])
def test_a_fleet_of_one_is_the_machine(policy: str) -> None:
    asked = poisson_requests(20.0, 4.0, 24, 6, 100, slo=SLO(first_token=0.2, deferral=0.4))
    load = replay(machine(policy=policy), Workload("w", "", 4.0, tuple(asked), (JOB,)), patience=10.0)
    found = Fleet([machine(policy=policy)], RoundRobin(1)).run(asked, [JOB], 4.0, 10.0)
    assert len(found.answers) == len(load.answers) == 80
    # A fleet's training ends with the load, a replay's with its last answer.
    pairs = [(a, b) for a, b in zip(found.answers, load.answers, strict=True) if b.tokens[-1] < 4.0]
    assert len(pairs) > 60
    assert all(ours.first_token == theirs.first_token for ours, theirs in pairs)
    assert all(ours.is_within == theirs.keeps(theirs.slo) for ours, theirs in pairs)
    assert found.tokens <= 80 * 6 and found.trained == pytest.approx(load.training_rate() * 4.0, rel=0.1)


def test_every_request_is_answered_once_whatever_the_fleet() -> None:
    asked = poisson_requests(60.0, 3.0, 16, 5, 100)
    for router in ("round-robin", "least-loaded"):
        found = Fleet([machine(n) for n in range(4)], make_router(router, 4)).run(asked, [JOB] * 2, 3.0, 60.0)
        assert sorted(answer.arrival for answer in found.answers) == sorted(request.at for request in asked)
        assert all(answer.tokens == 5 and answer.is_done for answer in found.answers)
        assert {answer.machine for answer in found.answers} == set(range(4))


def test_a_request_that_comes_while_the_last_step_is_under_way_counts_as_unanswered() -> None:
    asked = [replace(one, at=0.004 * n) for n, one in enumerate(poisson_requests(10.0, 0.5, 4000, 2, 100))]
    load = replay(machine(), Workload("w", "", 0.02, tuple(asked), ()), patience=0.0)
    assert [answer.arrival for answer in load.answers] == [one.at for one in asked]
    assert not load.answers[-1].tokens and load.attainment(SLO()) < 1.0


def test_more_machines_answer_sooner() -> None:
    asked = poisson_requests(80.0, 2.0, 16, 20, 100)
    waits = []
    for count in (1, 2, 4):
        found = Fleet([machine(n) for n in range(count)], LeastLoaded(count)).run(asked, [], 2.0, 60.0)
        waits.append(percentile([answer.first_token for answer in found.answers], 0.9))
    assert waits[0] > waits[1] > waits[2]


def test_the_least_loaded_machine_is_chosen() -> None:
    router, counts = LeastLoaded(3), [0, 0, 0]
    for _ in range(9):
        counts[router.choose()] += 1
    assert counts == [3, 3, 3]
    router.ended(1)
    router.ended(1)
    router.ended(2)
    assert [router.choose() for _ in range(3)] in ([1, 1, 2], [1, 2, 1])
    with pytest.raises(ConfigError, match="no router 'luck'; there are round-robin, least-loaded"):
        make_router("luck", 2)


def test_who_can_never_be_served_is_refused_alone() -> None:
    asked = [TimedRequest(0.0, (0,) * 5000, 1), TimedRequest(0.0, (0,) * 8, 2)]
    found = Fleet([machine()], RoundRobin(1)).run(asked, [], 1.0, 5.0)
    assert len(found.refused) == 1 and "positions" in found.refused[0]
    assert [answer.is_done for answer in found.answers] == [False, True]
    assert figures_of(found).within == 0.5 and figures_of(found).unanswered == 1


def test_training_ends_with_the_load() -> None:
    found = Fleet([machine()], RoundRobin(1)).run([], [JOB], 2.0, 100.0)
    assert 2.0 <= found.ended < 3.0 and found.trained > 0


def test_an_answers_figures() -> None:
    answer = Answered(1.0, SLO(first_token=1.0, between_tokens=0.5, end_to_end=3.0))
    for at in (2.0, 2.4, 2.9):
        answer.note(at)
    assert not answer.is_within  # not at its end
    answer.is_done = True
    assert (answer.first_token, answer.longest) == (1.0, pytest.approx(0.5))
    assert answer.token_seconds == pytest.approx(0.45)
    answer.longest = 0.5
    assert answer.is_within
    answer.note(4.5)
    assert not answer.is_within


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_is_within_its_bounds_where_none_is_missed(seed: int) -> None:
    """Each of the bounds alone decides in some cases."""
    draw, decided = random.Random(seed), set[str]()
    for _ in range(200):
        times = sorted(draw.uniform(1.0, 3.0) for _ in range(draw.randint(1, 4)))
        deferred = draw.uniform(0.0, 1.0)
        taken = {
            "first_token": times[0] - 1.0,
            "between_tokens": max((b - a for a, b in pairwise(times)), default=0.0),
            "end_to_end": times[-1] - 1.0,
            "deferral": deferred,
        }
        bounds = {name: draw.choice([None, draw.uniform(0.3, 2.0) * had]) for name, had in taken.items()}
        answer = Answered(1.0, SLO(**bounds))
        for at in times:
            answer.note(at)
        answer.deferred, answer.is_done = deferred, draw.random() < 0.9
        missed = [name for name, bound in bounds.items() if bound is not None and taken[name] > bound]
        assert answer.is_within is (answer.is_done and not missed)
        decided |= {*missed} if len(missed) == 1 else set()
    assert len(decided) == 4


class Noting(SimulatedMachine):
    """A machine that keeps the sequences of its requests, by their arrival."""

    def __init__(self, policy: str, seed: int) -> None:
        super().__init__(policy, TIMES, MachineSettings(jitter=Jitter(0.0, 0.0)), seed)
        self.asked: dict[float, Sequence] = {}

    def ask(self, request: TimedRequest, arrival: float) -> Sequence:
        self.asked[arrival] = super().ask(request, arrival)
        return self.asked[arrival]


@pytest.mark.parametrize("policy", ["temporal:2,grain=batch", "temporal:5,grain=batch", "deferred:0.2"])
def test_answers_that_training_deferred_beyond_their_bound_are_late(policy: str) -> None:
    """The seconds are those that the schedulers of the machines have counted."""
    draw, machines = random.Random(policy), [Noting(policy, seed) for seed in range(2)]
    asked = [
        replace(one, slo=SLO(deferral=draw.choice([None, 10.0 ** draw.uniform(-3, 0.5)])))
        for one in poisson_requests(20.0, 2.0, 24, 4, 100)
    ]
    found = Fleet(machines, RoundRobin(2)).run(asked, [JOB] * 2, 2.0, 30.0)
    deferred = {at: one.deferred for each in machines for at, one in each.asked.items()}
    assert [answer.deferred for answer in found.answers] == [deferred[one.at] for one in asked]
    late = [one for one in asked if one.slo.deferral is not None and deferred[one.at] > one.slo.deferral]
    assert [answer.arrival for answer in found.answers if not answer.is_within] == [one.at for one in late]
    assert found.late == len(late) and 3 < len(late) < len(asked) - 3


def test_who_bears_a_step_does_not_stop_its_training() -> None:
    flex, soon, whole = SLO(deferral=60.0), SLO(first_token=1.0), SLO(first_token=9.0, end_to_end=2.0)
    bounds = [flex, whole, soon, SLO(between_tokens=9.0), replace(soon, slowdown=2.0), flex]
    asked = [TimedRequest(float(at), (1,), 4, slo=slo) for at, slo in enumerate(bounds)]
    found = [next_pressing(asked, seconds) for seconds in (9.0, 0.09, 0.06, 0.04)]
    assert found == [1.0, 2.0, 2.0, 3.0], "a step is to be a small part of what bounds the first token"
    assert next_pressing(asked[4:], 0.04) == 4.0 and next_pressing(asked[5:], 9.0) == float("inf")
