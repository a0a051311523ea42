"""Policies judged on traffic: figures by hand, and the real engine on a tiny shape for parts of a second."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.compact import rounded
from coserve.core.request import SLO
from coserve.errors import ConfigError, DataError, ServerError
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.requests import ServedAdapters, TimedRequest, Workload
from coserve.workload.shapes import shape_named
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.mixes import TrainingSpec, WorkloadSettings
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.policies import papers, rounds, run, switching, traffic
from coserve_benchmarks.policies.contest import (
    OURS,
    Contest,
    attained,
    charge_deferral,
    own_bounds,
    summary,
    within,
)
from coserve_benchmarks.policies.fitted import RoundSettings
from coserve_benchmarks.policies.isolated import isolated
from coserve_benchmarks.policies.rounds import ContestRunner
from coserve_benchmarks.policies.testbed import EngineTestbed, patience_for
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import settings_for

SHAPE = shape_named("tiny")
GIVEN = WorkloadSettings(SHAPE.vocabulary, 0.5, SLO(first_token=5.0))
TRAINING = TrainingSpec(batch=2, length=32, examples=8)
WORKLOAD = traffic.poisson(
    GIVEN, rate=12.0, prompt=16, answer=6, training=TRAINING, adapters=ServedAdapters(2, 4, 1.0)
)

# The figures of a round


def test_a_round_is_summed_up() -> None:
    """Four seconds; the third of four requests has no answer, and the fourth came too late to be asked."""
    requests = tuple(TimedRequest(at, (1,), 3) for at in (0.5, 2.0, 3.0, 3.9))
    bounded = SLO(end_to_end=1.0)
    load = LoadResult(
        started=100.0,
        seconds=4.0,
        answers=[
            AnswerTimes(100.5, [101.0, 101.5, 102.5], bounded),
            AnswerTimes(102.0, [102.5], bounded),
            AnswerTimes(103.0, [], bounded),
        ],
        trained=[(100.5, 10.0), (101.5, 30.0), (103.9, 20.0), (104.5, 99.0)],
        losses=[4.0, 3.0, *[2.0] * 16, 1.5, 0.5],
        processor=6.0,
        finished_at=105.0,
    )
    workload = Workload("w", "W", 4.0, requests, ())
    found = summary(load, workload, {"own": own_bounds, "2 s": within(2.0)}, note="said")
    assert found == {
        "latency": {"mean": 1.25, "p50": 1.25, "p99": pytest.approx(1.985)},  # 0.5 and 2
        "first_token": {"mean": 0.5, "p50": 0.5, "p99": 0.5},
        "between": {"mean": 0.75, "p50": 0.75, "p99": pytest.approx(0.995)},  # 0.5 and 1
        "attainment": {"own": 0.25, "2 s": 0.5},  # of all four
        "training": pytest.approx((60.0 + 99.0 / 6) / 4),  # of the last step's time a sixth is within
        "loss": [3.5, 1.0],  # the first and the last tenth
        "processor": 6.0 / 5.0 / torch.get_num_threads(),
        "requests": 4,
        "unanswered": 2,
        "latencies": [0.5, 2.0],
        "flow": [[0.0, 0.0, 10.0, 1.0], [1.0, 2.0, 30.0, 0.0], [2.0, 2.0, 0.0, 1.0], [3.0, 0.0, 20.0, 2.0]],
        "note": "said",
    }


def test_a_round_in_which_nothing_happened() -> None:
    load = LoadResult(100.0, 0.5, finished_at=100.5)
    found = summary(load, Workload("w", "W", 0.5, (), ()), {"own": own_bounds}, "")
    assert found["latency"] is found["first_token"] is found["between"] is found["loss"] is None
    assert (found["training"], found["attainment"], found["flow"]) == (0.0, {"own": 0.0}, [[0.0] * 4])


def test_processors_are_used_until_the_load_is_over() -> None:
    """Training in a process of its own goes on after the last answer."""
    load = LoadResult(100.0, 4.0, processor=6.0, finished_at=101.0)
    found = summary(load, Workload("w", "W", 4.0, (), ()), {"own": own_bounds}, "")
    assert found["processor"] == 1.5 / torch.get_num_threads()


def test_what_is_judged() -> None:
    slow, late = SLO(deferral=1.0), SLO(first_token=0.4)
    assert own_bounds(AnswerTimes(0.0, [9.0], slow, deferred=1.0))
    assert not own_bounds(AnswerTimes(0.0, [9.0], slow, deferred=1.1))
    assert not own_bounds(AnswerTimes(0.0, [0.5, 0.6], late))
    assert not own_bounds(AnswerTimes(0.0)) and not within(9.0)(AnswerTimes(0.0))
    assert within(2.0)(AnswerTimes(1.0, [2.0, 3.0])) and not within(1.9)(AnswerTimes(1.0, [2.0, 3.0]))
    load = LoadResult(0.0, 1.0, [AnswerTimes(0.0, [0.5]), AnswerTimes(0.0, [1.5])])
    assert attained(load, Workload("w", "W", 1.0, (TimedRequest(0, (1,), 1),) * 4, ()), within(1.0)) == 0.25


def test_nobody_has_more_than_the_peak() -> None:
    """The share of who trains more than the peak is not told; that the peak is wrong is."""
    found = contest("w", adaptive=(1.0, 130.0), hybrid=(1.0, 60.0))
    found.runs["adaptive"]["note"] = "said"
    found.peak = 120.0
    runs = found.as_dict()["runs"]
    assert runs["hybrid"]["training_share"] == 0.5 and runs["adaptive"]["training_share"] is None
    assert runs["adaptive"]["note"] == (
        "said; it trained more than the peak that was measured: the peak is wrong"
    )
    assert found.as_dict()["peak"] == 120.0 and found.beyond_peak == ["adaptive"]


# Who leads


def bench(path: Path | None = None) -> Bench:
    return Bench(SHAPE, settings_for("tiny", True), measure_machine(quick=True), Results({}, path, run.BARS))


@pytest.fixture(scope="module")
def compared() -> ContestRunner:
    return ContestRunner(None, RoundSettings(1.0, SHAPE.vocabulary), bench())  # type: ignore[arg-type]  # nothing runs here


def contest(name: str, **runs: tuple[float, float]) -> Contest:
    """By name: attainment and fine-tuning tokens/s."""
    found = Contest(Workload(name, name, 1.0, (), ()), {}, {}, 1.0)
    for run_, (kept, trained) in runs.items():
        found.runs[run_] = {"attainment": {"own": kept, "another": 0.0}, "training": trained}
    return found


def trained(rate: float, kept: float) -> LoadResult:
    """Ten requests, so many of them answered within a second, and fine-tuning tokens/s."""
    answers = [AnswerTimes(100.0, [100.5 if n < 10 * kept else 109.0]) for n in range(10)]
    return LoadResult(100.0, 10.0, answers, [(109.0, 9.0 * rate)], finished_at=109.0, is_apart=True)


class Scripted:
    """An arena whose policies do in each round what is written down for it."""

    def __init__(self, **script: list[tuple[float, float]]) -> None:
        self.script, self.ran, self.peaks = script, list[str](), list[float]()

    def peak(self, workload: Workload, seconds: float) -> float:
        self.peaks.append(seconds)
        return 100.0 + len(self.peaks)

    def run(self, policy: str, workload: Workload) -> LoadResult:
        self.ran.append(policy)
        return trained(*self.script[policy].pop(0))

    def isolated(self, workload: Workload, judge: Any) -> tuple[LoadResult, str]:
        return self.run("isolated", workload), "said"


class Slowing(Scripted):
    """An arena that trains what is written down for a policy, and less after every four rounds."""

    def alone(self, workload: Workload) -> LoadResult:
        return LoadResult(100.0, 0.001, finished_at=101.0)

    def run(self, policy: str, workload: Workload) -> LoadResult:
        self.ran.append(policy)
        (rate, kept), *_ = self.script.get(policy, [(50.0, 1.0)])
        return trained(rate / (1 + (len(self.ran) - 1) // 4), kept)


def test_what_deferral_gains_is_told_from_rounds_of_the_same_minute() -> None:
    policies = {"continuous": 100.0, "deferred": 110.0, "deferred:0.5,together=1": 130.0, OURS: 120.0}
    testbed = Slowing(**{policy: [(rate, 1.0)] for policy, rate in policies.items()})
    it = ContestRunner(testbed, RoundSettings(10.0, SHAPE.vocabulary, again=1), bench())  # type: ignore[arg-type]
    papers.fineinfer(it)
    assert testbed.ran[:24] == [*policies] * 6  # twice at each of their bounds, once at those beyond
    found = it.bench.results.as_dict()
    assert found["fineinfer.gain"] == found["fineinfer.gain_at_the_other_bound"] == pytest.approx(1.3)
    notes = found["notes"]
    assert "at most 0.5 s there" in notes["fineinfer.gain"]  # chosen before, and not the better one
    assert "at most 0.3 s there" in notes["fineinfer.gain_at_the_other_bound"]
    assert "not the paper's algorithm to the letter" in notes["fineinfer.gain"]
    assert found["spreads"]["fineinfer.gain"] == pytest.approx((1.3, 1.3))
    assert found["fineinfer.gain_to_the_letter"] == pytest.approx(1.1)
    points = it.sweeps["deferral"]
    assert len(points) == 16 and points[-1]["bound"] == pytest.approx(points[0]["bound"] * 4.0 / 0.3)
    rate = trained(100.0, 1.0).overall_training_rate()
    assert points[0]["training"] == pytest.approx((rate + rate / 2) / 2)  # of two rounds


def test_the_reports_rows_are_of_rounds_in_turn() -> None:
    """Enhanced against the best of three temporal ones, by rounds of the same minute; attainment of all."""
    found = contest("report")
    for name, kept, rates in (
        ("temporal:5", 0.2, [90.0, 45.0]),
        ("temporal:10", 0.5, [100.0, 50.0]),
        ("temporal:20", 0.4, [80.0, 40.0]),
        ("enhanced-temporal", 1.0, [75.0, 37.5]),
    ):
        found.runs[name] = {
            "attainment": {"tight": kept, "loose": kept + 0.0}, "training": rates[0], "requests": 10,
            "rounds": 2, "training_rounds": rates,
        }  # fmt: skip
    it = ContestRunner(None, RoundSettings(1.0, SHAPE.vocabulary), bench())  # type: ignore[arg-type]
    papers._report_rows(it, found)
    rows = it.bench.results.as_dict()
    assert rows["report.enhanced_vs_temporal_training"] == 0.75
    assert rows["spreads"]["report.enhanced_vs_temporal_training"] == (0.75, 0.75)
    assert "over temporal:10" in rows["notes"]["report.enhanced_vs_temporal_training"]
    assert (rows["report.temporal_tight"], rows["report.temporal_loose"]) == (0.5, 0.2)
    low, high = rows["spreads"]["report.enhanced_tight"]
    assert rows["report.enhanced_tight"] == high == 1.0 and 0.8 < low < 0.9  # of 20 requests
    assert "0.200, 0.500, 0.400" in rows["notes"]["report.temporal_tight"]


def test_deferral_is_what_an_answer_took_longer() -> None:
    load = LoadResult(0.0, 1.0, [AnswerTimes(1.0, [2.0, 4.5]), AnswerTimes(1.0, [2.0]), AnswerTimes(1.0, [])])
    other = LoadResult(
        9.0, 1.0, [AnswerTimes(9.0, [10.0, 11.0]), AnswerTimes(9.0, [12.0]), AnswerTimes(9.0, [10.0])]
    )
    charge_deferral(load, other)
    assert [answer.deferred for answer in load.answers] == [1.5, 0.0, 0.0]


def test_those_that_one_round_does_not_tell_apart_have_more_in_turn() -> None:
    testbed = Scripted(
        adaptive=[(90, 1.0), (60, 0.9), (100, 0.8)],
        hybrid=[(70, 1.0), (110, 1.0), (80, 1.0)],  # within 30 %
        spatial=[(60, 1.0)],  # half as much again is more than that
        whole=[(100, 0.8)],  # keeps less by more than a tenth
        isolated=[(90, 0.9), (91, 0.9), (92, 0.9)],
    )
    requests = tuple(TimedRequest(0.0, (1,), 1) for _ in range(10))
    sizes = RoundSettings(1.0, SHAPE.vocabulary, again=2)
    it = ContestRunner(testbed, sizes, bench())  # type: ignore[arg-type]
    workload = Workload("w", "W", 10.0, requests, ())
    names = ("adaptive", "hybrid", "spatial", "whole")
    found = it.contest(workload, names, {"1 s": within(1.0)}, {"1 s": "1 s"})
    again = ["adaptive", "hybrid", "isolated"]
    assert testbed.ran == [*names, "isolated", *again, *again]
    assert testbed.peaks == pytest.approx([0.3, 0.6]) and found.peak == 102.0  # before and after, the best
    assert [found.training(name) for name in (*names, "isolated")] == pytest.approx(
        [81, 72, 54, 90, 82.8], rel=0.2
    )
    assert found.attainment(OURS) == pytest.approx(0.9) and found.attainment("whole") == pytest.approx(0.8)
    runs = found.runs
    assert runs[OURS]["rounds"] == 3 and runs["whole"]["rounds"] == 1
    low, high = runs[OURS]["training_spread"]
    assert low < found.training(OURS) < high
    assert found.training("hybrid") < found.training(OURS)  # by the round in the middle of each


def compare(compared: ContestRunner, *contests: Contest) -> dict[str, Any]:
    results = Results({}, None, run.BARS)
    it = replace(compared, bench=replace(compared.bench, results=results))
    it.done = {one.workload.name: one.as_dict() for one in contests}
    run._compare(it)
    return results.as_dict()


@pytest.mark.parametrize(
    ("other", "dominates"),
    [
        ((1.0, 103.0), True),
        ((0.995, 103.0), True),  # no less than ours
        ((0.994, 500.0), False),  # less
        ((1.0, 102.0), False),  # not over 2 % more
        ((1.0, 50.0), False),
    ],
)
def test_who_keeps_as_much_and_trains_more_dominates(
    other: tuple[float, float], dominates: bool, compared: ContestRunner
) -> None:
    found = compare(compared, contest("w", adaptive=(0.995, 100.0), hybrid=other, spatial=(0.5, 900.0)))
    assert found["ours.dominated"] == float(dominates)
    assert found["met"]["ours.dominated"] is not dominates
    assert ("w: hybrid" in found["notes"]["ours.dominated"]) is dominates


def test_all_who_dominate_anywhere_are_counted(compared: ContestRunner) -> None:
    found = compare(
        compared,
        contest("v", adaptive=(0.9, 100.0), hybrid=(0.9, 110.0), spatial=(1.0, 200.0)),
        contest("w", adaptive=(0.0, 100.0), hybrid=(0.0, 150.0)),
        contest("instead", adaptive=(0.9, 1.0), hybrid=(1.0, 2.0)),  # who is compared there is somebody else
    )
    assert found["ours.dominated"] == 3.0
    assert "v: spatial, 200 tokens/s where ours trains 100" in found["notes"]["ours.dominated"]
    assert "ours.best_lead" not in found  # we kept 99 % nowhere


def test_the_lead_is_over_the_next_who_keeps_as_much(compared: ContestRunner) -> None:
    found = compare(
        compared,
        contest("v", adaptive=(0.99, 120.0), hybrid=(0.99, 100.0), spatial=(0.98, 900.0), whole=(1.0, 60.0)),
        contest("w", adaptive=(1.0, 130.0), hybrid=(1.0, 100.0)),
        contest("late", adaptive=(0.98, 900.0), hybrid=(1.0, 1.0)),  # we do not keep it
        contest("first", adaptive=(1.0, 900.0), hybrid=(0.5, 800.0), isolated=(1.0, 0.0)),  # nobody else
    )
    assert found["ours.best_lead"] == pytest.approx(1.3)
    note = found["notes"]["ours.best_lead"]
    assert note.startswith("on w;") and "v 1.20 over hybrid" in note and "nobody who trains" in note
    assert "late" not in note


def test_a_lead_that_nobody_follows_is_none(compared: ContestRunner) -> None:
    assert math.isnan(run._lead(5.0, {})[0]) and math.isnan(run._lead(5.0, {"isolated": (1.0, 0.0)})[0])
    found = compare(compared, contest("w", adaptive=(1.0, 5.0), isolated=(1.0, 0.0)))
    assert "ours.best_lead" not in found and found["ours.dominated"] == 0.0
    assert "ours.dominated" not in compare(compared, contest("instead", adaptive=(1.0, 5.0)))


# The engine


@pytest.fixture(scope="module")
def testbed() -> EngineTestbed:
    return EngineTestbed(bench())


def test_a_contest_of_two(testbed: EngineTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PEAK_SHARE", 0.6)
    it = ContestRunner(testbed, RoundSettings(0.5, SHAPE.vocabulary), bench(tmp_path / "bench.json"))
    named = {"whole": "temporal:2,grain=batch"}
    found = it.contest(WORKLOAD, (OURS,), {"own": own_bounds}, {"own": "5 s"}, named)
    assert list(found.runs) == ["whole", OURS, "isolated"]  # with one thread the last one only serves
    for name, figures in found.runs.items():
        assert (figures["requests"], figures["unanswered"]) == (6, 0)
        assert 0 < figures["first_token"]["p50"] <= figures["latency"]["p50"]
        assert (figures["training"] > 0) is (name != "isolated")
    assert found.runs["whole"]["note"] == named["whole"] and found.runs[OURS]["note"] == ""
    assert found.runs["isolated"]["note"].startswith("1 of 1 processors serve")
    assert found.peak > 0 and found.attainment(OURS) == found.runs[OURS]["attainment"]["own"]
    section = json.loads((tmp_path / "bench.json").read_text())["workloads"]["poisson"]
    assert section["runs"] == rounded(found.as_dict()["runs"]) and section["bounds"] == {"own": "5 s"}
    assert not testbed.engine.has_work  # the next round finds nothing of this one


@pytest.mark.parametrize(
    ("slo", "seconds"),
    [
        (SLO(), 5.0),
        (SLO(between_tokens=9.0), 50.0),  # five gaps
        (SLO(first_token=2.0, between_tokens=9.0), 52.0),
        (SLO(first_token=2.0, between_tokens=0.5, end_to_end=3.0), 9.5),
        (SLO(first_token=9.0, end_to_end=12.0), 17.0),
        (SLO(first_token=9.0, deferral=2.0), 14.0),
        (SLO(deferral=20.0), 25.0),
    ],
)
def test_nobody_is_given_up_within_a_bound_of_his_own(slo: SLO, seconds: float) -> None:
    first, *others = WORKLOAD.requests
    workload = replace(WORKLOAD, requests=(replace(first, slo=slo), *(replace(o, slo=SLO()) for o in others)))
    assert patience_for(workload) == seconds


def test_requests_alone_have_neither_bounds_nor_training(testbed: EngineTestbed) -> None:
    load = testbed.alone(WORKLOAD)
    assert [len(answer.tokens) for answer in load.answers] == [6] * 6
    assert {answer.slo for answer in load.answers} == {SLO()} and not load.trained
    assert testbed.peak(WORKLOAD, 0.3) > 0


def test_nobody_alone_is_given_up(testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coserve_benchmarks.policies.testbed._PATIENCE", 0.0)
    requests = tuple(replace(request, at=0.0, slo=SLO()) for request in WORKLOAD.requests)
    hasty = replace(WORKLOAD, requests=requests, jobs=(), seconds=0.001)  # over after a step
    assert all(len(answer.tokens) < 6 for answer in testbed.run("hybrid", hasty).answers)
    assert [len(answer.tokens) for answer in testbed.alone(hasty).answers] == [6] * 6


def test_a_policy_is_told_by_name(testbed: EngineTestbed) -> None:
    with pytest.raises(ConfigError, match="no policy 'fifo'"):
        testbed.run("fifo", WORKLOAD)


def test_capacity_is_the_requests_over_their_seconds() -> None:
    """Of loads of 4, 2 and 8 seconds the median counts."""
    asked: list[Workload] = []

    class Alone(Scripted):
        def alone(self, workload: Workload) -> LoadResult:
            asked.append(workload)
            return LoadResult(100.0, 0.001, finished_at=100.0 + (4.0, 2.0, 8.0)[len(asked) - 1])

    it = ContestRunner(Alone(), RoundSettings(0.5, SHAPE.vocabulary), bench())  # type: ignore[arg-type]
    assert it.capacity(8, 2) == len(asked[0].requests) / 4.0
    assert {(request.at, request.answer) for request in asked[0].requests} == {(0.0, 2)}


def test_capacity_is_that_of_sixteen_at_once(testbed: EngineTestbed) -> None:
    it = ContestRunner(testbed, RoundSettings(0.5, SHAPE.vocabulary), bench())
    assert it.capacity(8, 2) > it.capacity(8, 24) > 0


def test_a_switch_is_what_work_takes_longer_after_the_other_kind(
    testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each two answers and two iterations the first took 4 s more and 2 less, 3 less and 1 less, and so
    on: less is not made nothing."""
    answers, iterations = iter([9.0, 5.0, 5.0, 8.0, 7.0, 7.0]), iter([4.0, 6.0, 5.0, 6.0, 9.0, 3.0])
    monkeypatch.setattr(switching, "_PAIRS", 1)
    monkeypatch.setattr(switching._Turns, "_answer", lambda self: next(answers))
    monkeypatch.setattr(switching._Turns, "_iterate", lambda self: next(iterations))
    monkeypatch.setattr(switching, "_between", lambda ran, into_training: -0.25)
    it = bench()
    switching.measure(it, testbed, replace(WORKLOAD, requests=WORKLOAD.requests[:1]), rounds=3)
    found = it.results.as_dict()
    assert found["switch.seconds"] == found["switch"]["seconds"] == pytest.approx(1.0)  # of 1, -2 and 3
    assert found["spreads"]["switch.seconds"] == pytest.approx((-2.0, 3.0))
    assert found["switch"]["clean_up"] == -0.25


def test_the_first_of_each_two_comes_after_the_other_kind(testbed: EngineTestbed) -> None:
    turns = switching._Turns(testbed, replace(WORKLOAD, requests=WORKLOAD.requests[:1]))
    ran: list[switching._Ran] = []
    for _ in range(2):
        turns.watching(turns.pairs, ran)
    turns.end()
    kinds = [trained for trained, _, _ in ran]
    switches = [before for before, after in pairwise(kinds) if before != after]
    assert switches == [False, True, False]  # two answers, two iterations, and again
    assert not kinds[0] and kinds[-1]


def test_what_switching_costs(testbed: EngineTestbed) -> None:
    it = bench()
    workload = replace(WORKLOAD, requests=WORKLOAD.requests[:1])
    switching.measure(it, testbed, workload, rounds=2)
    found = it.results.as_dict()
    low, high = found["spreads"]["switch.seconds"]
    assert low <= found["switch.seconds"] <= high and abs(found["switch.seconds"]) < 1.0
    assert found["switch"].keys() == {"initialisation", "clean_up", "data_movement", "seconds"}
    assert all(abs(part) < 1.0 for part in found["switch"].values())
    assert "run" not in vars(testbed.engine.loop.executor)  # nobody watches any more
    assert not testbed.engine.has_work


@pytest.mark.slow
def test_isolation_trains_in_a_process_of_its_own(testbed: EngineTestbed) -> None:
    before = torch.get_num_threads()
    testbed.run("hybrid", replace(WORKLOAD, seconds=0.1, jobs=()))  # the engine has the adapters then
    try:
        torch.set_num_threads(2)
        load = isolated(testbed.engine, SHAPE, replace(WORKLOAD, seconds=1.0), 1, 5.0)
        assert torch.get_num_threads() == 2
        with pytest.raises(ServerError, match="has died"):
            isolated(testbed.engine, replace(SHAPE, name="unknown"), WORKLOAD, 1, 5.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [len(answer.tokens) for answer in load.answers] == [6] * 6
    assert load.trained and load.losses and load.training_rate() > 0
    assert all(load.started - 0.5 < at < load.finished_at + 1.0 for at, _ in load.trained)  # one clock


# The command


def test_the_command_says_what_it_does() -> None:
    result = CliRunner().invoke(app, ["bench", "policies", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    made = ("--trace", "--prompts", "--seconds", "--page", "--picture", "--json", "--further", "--server")
    for option in (*made, "--quick", "--only"):
        assert option in result.output


def test_groups_and_traces_that_do_not_exist(tmp_path: Path) -> None:
    command = ["bench", "policies", "--shape", "tiny", "--quick"]
    found = CliRunner().invoke(app, [*command, "--only", "speed"])
    assert isinstance(found.exception, ConfigError) and "there are switch, report" in str(found.exception)
    wide = {"COLUMNS": "500", "TERM": "dumb"}  # a path is not broken anywhere
    found = CliRunner().invoke(app, [*command, "--trace", str(tmp_path / "none.csv")], env=wide)
    assert found.exit_code == 2 and "none.csv" in found.output
    (tmp_path / "trace.csv").write_text("when,in,out\n1,2,3\n")
    found = CliRunner().invoke(app, [*command, "--only", "azure", "--trace", str(tmp_path / "trace.csv")])
    assert isinstance(found.exception, DataError)
    assert "trace.csv, line 1: expected the columns of a trace (TIMESTAMP" in str(found.exception)
    found = CliRunner().invoke(app, [*command, "--page", str(tmp_path / "no" / "page.html")])
    assert isinstance(found.exception, ConfigError) and "--page" in str(found.exception)


@pytest.fixture
def few_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = switching.measure
    monkeypatch.setattr(switching, "measure", lambda *given, rounds: measure(*given, rounds=1))


@pytest.mark.usefixtures("few_switches")
def test_further_groups_join_what_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    found = contest("w", adaptive=(1.0, 130.0), hybrid=(1.0, 100.0))
    first = Results({"shape": "tiny", "groups": ["tiers"], "quick": True}, path, run.BARS)
    first.row("fineinfer.gain", 1.5, (1.0, 2.0), "said")
    first.figure("bench.tiers", 9.0, "seconds it took")
    first.section("workloads", {"w": found.as_dict()})
    run.run_policies("tiny", quick=True, only=("switch",), json_path=path, further=True)
    both = json.loads(path.read_text())
    assert both["groups"] == ["tiers", "switch"]
    assert (both["fineinfer.gain"], both["spreads"]["fineinfer.gain"]) == (1.5, [1.0, 2.0])
    assert both["notes"]["fineinfer.gain"] == "said" and both["met"]["fineinfer.gain"]
    assert both["figures"].keys() >= {"bench.tiers", "bench.switch"}
    assert both["workloads"]["w"]["runs"] == rounded(found.as_dict()["runs"]) and both["switch"].keys() >= {
        "seconds"
    }
    assert both["ours.best_lead"] == pytest.approx(1.3)  # of all that the file has


@pytest.mark.slow
@pytest.mark.usefixtures("few_switches")
def test_a_file_of_no_workload_yet_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for _ in range(2):
        found = run.run_policies("tiny", quick=True, only=("switch",), json_path=path, further=True)
    assert found["groups"] == ["switch"]
    assert json.loads(path.read_text())["switch"] == rounded(found["switch"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no results"),
        ('{"shape": "tiny"}', "no results"),
        ('{"shape": "tiny", "bars": {"train_ratio": null}}', "no results"),
        ('{"shape": "19m", "bars": {"switch.seconds": null}}', "19m"),
        ('{"shape": "tiny", "bars": {"switch.seconds": null}, "against": "a server"}', "not an engine"),
    ],
)
def test_files_that_cannot_be_gone_on_with(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run.run_policies("tiny", only=("switch",), json_path=path, further=True)
    assert path.read_text() == text
