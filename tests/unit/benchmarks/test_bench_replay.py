"""Workloads replayed against a server: what it is told, and what its clients saw."""

import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.requests import TimedJob, TimedRequest, Workload
from coserve.workload.shapes import shape_named
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.policies import run
from coserve_benchmarks.policies.replay import ServerTestbed, _config, _tiers
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import settings_for

TINY = shape_named("tiny")
SOON, LATER, WHENEVER = SLO(first_token=9.0), SLO(end_to_end=20.0), SLO(deferral=30.0)
JOB = TimedJob(0.0, "trained", tuple((n,) * 16 for n in range(64)), batch=2, rank=4, epochs=100)
WORKLOAD = Workload(
    "mixed",
    "mixed",
    3.0,
    (
        TimedRequest(0.2, (5, 6, 7), 4, None, SOON),
        TimedRequest(0.1, (8,), 3, "served-00", LATER),
        TimedRequest(0.4, (9, 10), 2, "served-01", LATER),
    ),
    (JOB,),
    (("served-00", 4), ("served-01", 8)),
)


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> ServerTestbed:
    results = Results({}, None, run.BARS)
    bench = Bench(TINY, settings_for("tiny", True), measure_machine(quick=True), results)
    return ServerTestbed(bench, tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize(
    ("slos", "tiers"),
    [
        ((), {}),
        ((LATER, LATER), {LATER: "default"}),
        ((WHENEVER, LATER), {LATER: "default", WHENEVER: "flex"}),
        ((WHENEVER, LATER, SOON), {SOON: "priority", LATER: "default", WHENEVER: "flex"}),
        ((SLO(), SOON), {SOON: "default", SLO(): "flex"}),
    ],
)
def test_the_most_urgent_bounds_have_the_first_tier(slos: tuple[SLO, ...], tiers: dict[SLO, str]) -> None:
    assert _tiers(slos) == tiers


def test_more_bounds_than_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 service tiers, and requests 4 bounds"):
        _tiers((SOON, LATER, WHENEVER, SLO()))


def test_the_server_is_told_the_bounds_and_nothing_else_of_them() -> None:
    found = tomllib.loads(_config({SOON: "default", SLO(): "flex"}, {"a b": Path("/x/y")}))["server"]
    told = {tier: {name: b for name, b in slo.items() if b < inf} for tier, slo in found["slo"].items()}
    assert told == {"default": {"first_token": 9.0}, "flex": {}}
    assert all(
        slo.keys() == set(SLO.__slots__) for slo in found["slo"].values()
    )  # no bound by default is left
    assert found["adapters"] == {"a b": "/x/y"}


@pytest.mark.slow
def test_what_clients_of_a_server_see(testbed: ServerTestbed) -> None:
    load = testbed.run("hybrid", WORKLOAD, patience=20.0)
    assert [len(answer.tokens) for answer in load.answers] == [4, 3, 2]
    assert [answer.slo for answer in load.answers] == [SOON, LATER, LATER]
    assert [a.arrival - load.started for a in load.answers] == pytest.approx([0.2, 0.1, 0.4], abs=0.15)
    assert all(0.0 < answer.latency < 20.0 and answer.keeps(answer.slo) for answer in load.answers)
    assert load.training_rate() > 0 and len(load.losses) >= len(load.trained) > 0
    step = JOB.batch * len(JOB.examples[0])
    assert {tokens % step for _, tokens in load.trained} == {0.0}  # whole optimizer steps
    assert sum(tokens for _, tokens in load.trained) <= step * len(load.losses)
    assert load.finished_at - load.started >= 3.0 and load.processor > 0.1


@pytest.mark.slow
def test_who_is_never_answered_is_given_up(testbed: ServerTestbed) -> None:
    """Training without an end, and everybody after it: once it is cancelled all answers come, too late."""
    requests = tuple(replace(request, slo=WHENEVER, adapter=None) for request in WORKLOAD.requests)
    load = testbed.run("postpone-all", replace(WORKLOAD, requests=requests, served=()), patience=1.0)
    assert [answer.tokens for answer in load.answers] == [[], [], []]
    assert load.training_rate() > 0


@pytest.mark.slow
def test_deferral_is_what_answers_took_longer_than_without_training(testbed: ServerTestbed) -> None:
    requests = tuple(replace(request, slo=WHENEVER, adapter=None) for request in WORKLOAD.requests)
    load = testbed.run("hybrid", replace(WORKLOAD, requests=requests, served=()), patience=20.0)
    alone = testbed.alone(replace(WORKLOAD, requests=requests, served=()))
    assert all(answer.keeps(WHENEVER) for answer in load.answers) and not alone.trained
    assert all(0.0 <= answer.deferred < answer.latency for answer in load.answers)
