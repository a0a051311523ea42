"""Rows of the slowdown by training, against another count of what training took of each answer."""

from dataclasses import replace
from statistics import mean, median

import pytest

from coserve.core.events import Event
from coserve.core.plan import BasePlan
from coserve.schedule.cost import CostModel
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import AnswerTimes, LoadResult, replay
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import TimedJob, Workload, training_tokens
from coserve.workload.shapes import shape_named
from coserve_benchmarks import coserving, slowdown
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench, make_engine
from coserve_benchmarks.results import BARS, Results
from coserve_benchmarks.settings import TINY
from coserve_benchmarks.simulated import TWO_CORES
from coserve_benchmarks.slowdown import Pair, measure, slowdown_of, write_rows

SETTINGS = replace(TINY, prompt=256, answer=32, slowdown_rounds=2, slowdown_seconds=20.0)


class Watched(SimulatedMachine):
    """A machine without jitter that notes when each step was, and the training in it by its true costs."""

    def __init__(self, bound: float) -> None:
        settings = MachineSettings(jitter=Jitter(0.0, 0.0), scheduler={"slowdown": bound})
        super().__init__("hybrid", WeightedTimes(TWO_CORES, 16), settings)
        self.steps: list[tuple[float, float, float]] = []

    def step(self, arrival: float = float("inf")) -> list[Event]:
        begun, ran = self.clock(), list[BasePlan]()
        self.executor.observe = lambda plan, result, began: ran.append(plan)
        events = super().step(arrival)
        for plan in ran:
            predict = CostModel(TWO_CORES).predict
            alone = predict(BasePlan(inference=plan.inference)) if plan.inference else 0.0
            trained = predict(plan) - alone if plan.training or plan.updates else 0.0
            self.steps.append((begun, self.clock(), trained))
        return events

    def taken(self, answer: AnswerTimes, begin: float, end: float) -> float:
        """Seconds that training took of an answer between two moments. Who comes during a step waits for its
        end, and training is the last in it."""
        return sum(
            min(trained, over - max(answer.arrival, begun))
            for begun, over, trained in self.steps
            if begin < over <= end
        )


def counted(machine: Watched, answer: AnswerTimes) -> float:
    first, last = answer.tokens[0], answer.tokens[-1]
    before, after = (machine.taken(answer, *span) for span in ((answer.arrival, first), (first, last)))
    return max(
        (first - answer.arrival) / (first - answer.arrival - before), (last - first) / (last - first - after)
    )


def jobs() -> tuple[TimedJob, ...]:
    tokens = tuple(training_tokens([512] * 8, 1000))
    return tuple(TimedJob(0.0, f"job-{number}", tokens, 4, epochs=100_000) for number in range(2))


@pytest.mark.parametrize("bound", [1.5, 2.5])
def test_the_share_is_that_of_another_count(bound: float) -> None:
    """Also where a scheduler that allows more leaves the bound broken."""
    machines: list[Watched] = []

    def beside(load: Workload) -> LoadResult:
        machines.append(Watched(bound))
        requests = tuple(replace(one, slo=replace(one.slo, slowdown=bound)) for one in load.requests)
        return replay(machines[-1], replace(load, requests=requests, jobs=jobs()))

    def alone(load: Workload) -> LoadResult:
        return replay(Watched(bound), load)

    rounds = measure(SETTINGS, 2.4, 1000, alone, beside)
    found = Results({})
    write_rows(found, rounds)
    rows = found.as_dict()
    others = [
        counted(machine, answer)
        for machine, pair in zip(machines, rounds, strict=True)
        for answer in pair.beside.answers
    ]
    ours = [slowdown_of(answer) for pair in rounds for answer in pair.beside.answers]
    assert len(ours) > 60 and ours == pytest.approx(others, rel=1e-6)
    assert rows["slowdown.kept"] == mean(other <= 1.5 for other in others)
    assert rows["slowdown.kept"] == 1.0 if bound == 1.5 else rows["slowdown.kept"] < 0.9
    gaps = [[median(mean(a.gaps) for a in half.answers) for half in (p.beside, p.alone)] for p in rounds]
    assert rows["slowdown.between"] == pytest.approx(median(with_ / without for with_, without in gaps))
    assert 1.1 < rows["slowdown.between"] < bound * 1.1 and rows["slowdown.first"] > 1.0
    assert rows["figures"]["slowdown.training"]["value"] > 30


def test_both_halves_of_a_round_have_the_same_arrivals_and_rounds_others() -> None:
    seen: list[Workload] = []

    def served(load: Workload) -> LoadResult:
        seen.append(load)
        return LoadResult(0.0, 1.0)

    assert (
        measure(SETTINGS, 2.4, 1000, served, served) == [Pair(LoadResult(0.0, 1.0), LoadResult(0.0, 1.0))] * 2
    )
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0].requests != seen[2].requests
    assert all(request.slo.slowdown == 1.5 for load in seen for request in load.requests)


def test_rows_of_answers_that_are_written_down() -> None:
    """Of three answers one is 1.6 times as long as without its training; ten seconds hold the others."""
    alone = [AnswerTimes(0.0, [1.0, 2.0, 3.0]) for _ in range(3)]
    beside = [
        AnswerTimes(0.0, [1.2, 2.4, 3.6], deferred=0.6, deferred_first=0.2),
        AnswerTimes(0.0, [1.6, 2.6, 3.6], deferred=0.6, deferred_first=0.6),
        AnswerTimes(0.0, [1.0, 2.0, 3.0]),
    ]
    found = Results({})
    write_rows(found, [Pair(LoadResult(0.0, 10.0, alone), LoadResult(0.0, 10.0, beside))])
    rows = found.as_dict()
    assert rows["slowdown.kept"] == pytest.approx(2 / 3) and not rows["met"]["slowdown.kept"]
    assert rows["slowdown.first"] == pytest.approx(1.2) and rows["slowdown.between"] == pytest.approx(1.0)
    assert rows["figures"]["slowdown.kept_replayed"]["value"] == pytest.approx(2 / 3)


def test_a_round_on_an_engine_trains_in_one_half_alone() -> None:
    assert BARS["slowdown.kept"] is not None and BARS["slowdown.kept"].value == 0.99
    bench = Bench(
        shape_named("tiny"), replace(TINY, slowdown_rounds=2), measure_machine(quick=True), Results({})
    )
    engine = make_engine(bench, calibrate=False)
    terms = coserving._Terms(10.0, slowdown.SLO(), 1.0, 1.0)
    rounds = coserving._slowdown_rounds(bench, engine, terms)
    for pair in rounds:
        assert not pair.alone.trained and pair.beside.trained
        assert not any(answer.deferred for answer in pair.alone.answers)
        assert [len(answer.tokens) for half in (pair.alone, pair.beside) for answer in half.answers] == [
            TINY.answer
        ] * (2 * len(pair.alone.answers))
