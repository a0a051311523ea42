"""Rows of a co-serving run, from loads that are written down."""

from typing import Any

import pytest

from coserve.core.request import SLO
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.shapes import shape_named
from coserve_benchmarks import coserving
from coserve_benchmarks.coserving import Slicing
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Results
from coserve_benchmarks.settings import TINY

TERMS = coserving._Terms(1.0, SLO(first_token=1.0), capacity=10.0, peak=100.0)
OURS, IDLE = "coserve.vs_time_slicing", "no training at all"


def load(kept: float, trained: float) -> LoadResult:
    """Ten seconds with a request in each, of which so many are in time, and fine-tuning tokens/s."""
    answers = [AnswerTimes(float(at), [at + (0.5 if at < 10 * kept else 1.5)]) for at in range(10)]
    return LoadResult(0.0, 10.0, answers, [(float(at), trained) for at in range(1, 11)] if trained else [])


def rows(monkeypatch: pytest.MonkeyPatch, *sliced: tuple[float, float]) -> dict[str, Any]:
    """Rows where ours keeps all and trains 80 tokens/s, and time-slicing has these loads."""
    loads = iter(sliced)
    slicings = [Slicing(n, 4) for n in range(len(sliced))]
    monkeypatch.setattr(coserving, "_slicings", lambda bench: slicings)
    monkeypatch.setattr(
        coserving,
        "_sliced",
        lambda bench, slicing, terms: terms.score(slicing.describe(), load(*next(loads))),
    )
    bench = Bench(shape_named("tiny"), TINY, measure_machine(quick=True), Results({}))
    idle = TERMS.score(IDLE, load(1.0, 0.0))
    coserving._time_slicing_row(bench, TERMS, TERMS.score("coserve", load(1.0, 80.0)), idle)
    return bench.results.as_dict()


def test_a_peer_that_trains_nothing_is_named_and_one_that_trains_has_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody who trains keeps ours: the ratio to not training at all, and to the closest that trains."""
    found = rows(monkeypatch, (0.5, 90.0), (0.7, 30.0), (0.7, 40.0))
    assert found[OURS] == pytest.approx((0.1 + 0.8) / 0.1)
    assert f"{IDLE}; it trains nothing at all; its attainment of 1.000 reaches" in found["notes"][OURS]
    assert found[f"{OURS}_training"] == pytest.approx((0.1 + 0.8) / (0.1 + 0.4), rel=0.05)
    note = found["notes"][f"{OURS}_training"]
    assert "n=2, 4 examples at once; it trains 40 tokens/s" in note
    assert "attainment of 0.700 does not reach the 0.990" in note
    assert f"{OURS}_training" in found["bars"] and f"{OURS}_training" not in found["met"]


def test_of_those_that_keep_ours_the_most_efficient_is_the_peer_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rows(monkeypatch, (1.0, 20.0), (1.0, 40.0), (0.9, 90.0))
    assert found[OURS] == found[f"{OURS}_training"] == pytest.approx(0.9 / 0.5)
    assert found["notes"][OURS] == found["notes"][f"{OURS}_training"]
    low, high = found["spreads"][OURS]
    assert low <= found[OURS] <= high


def test_efficiency_by_the_second_has_the_whole_loads_mean() -> None:
    uneven = LoadResult(5.0, 4.0, [AnswerTimes(5.0, [5.5, 8.5])], [(6.0, 10.0), (8.0, 50.0), (9.5, 30.0)])
    seconds = TERMS.by_second(uneven)
    assert len(seconds) == 4
    assert sum(seconds) / 4 == pytest.approx(TERMS.efficiency(uneven))
    assert seconds[0] == pytest.approx(1 / 10 + 10 / 100)


def test_a_curve_of_many_seconds_is_drawn_of_their_quantiles() -> None:
    assert coserving._drawn([0.3, 0.1, 0.2]) == [0.1, 0.2, 0.3]
    seconds = [0.001 * place for place in range(5001)]
    drawn = coserving._drawn(seconds[::-1])
    assert len(drawn) == 1000 and drawn == sorted(drawn)
    assert drawn == pytest.approx([5.0 * place / 999 for place in range(1000)], abs=2e-5)
