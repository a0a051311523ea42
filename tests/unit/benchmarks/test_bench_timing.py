import threading
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from coserve.core.request import SLO
from coserve.engine.arrivals import Arrivals
from coserve.engine.engine import Engine
from coserve.errors import ConfigError
from coserve.schedule.config import SchedulerConfig
from coserve.simulate.driven import announced
from coserve.simulate.intervals import percentile
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.workload.shapes import shape_named
from coserve_benchmarks.adapters.sizes import AdapterSizes
from coserve_benchmarks.adapters.swap import SwapSizes
from coserve_benchmarks.intervals import interval, ratio_of_means, share_interval
from coserve_benchmarks.policies import instead, run
from coserve_benchmarks.results import BARS, Bar, Results
from coserve_benchmarks.settings import FULL
from coserve_benchmarks.timing import OF_REQUESTS, OF_ROUNDS, Timing, alternate, ratio_of, speedup
from scripted_executor import ScriptedExecutor
from waiting import PATIENCE


def test_contestants_take_turns_and_warm_up() -> None:
    order: list[str] = []

    def contestant(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    contestants = {"a": lambda: contestant("a", 1.0), "b": lambda: contestant("b", 3.0)}
    times = alternate(contestants, rounds=2, threads=1)
    assert order == ["a", "b"] * 3
    assert times["b"].seconds == (3.0, 3.0)


def test_a_ratio_is_the_median_of_those_of_neighbouring_rounds() -> None:
    """A machine that slows down by half in the middle changes no ratio of a round."""
    ours, peer = Timing((1.0, 2.0, 1.0, 1.0, 2.0)), Timing((3.0, 6.5, 3.0, 2.5, 6.0))
    ratio = speedup(ours, peer)
    assert ratio.value == 3.0
    assert 2.5 <= ratio.low <= 3.0 <= ratio.high <= 3.25
    draws = np.random.default_rng(1).normal(size=25)
    assert interval(np.mean, draws) == interval(np.mean, draws)  # the resamples are seeded


def test_intervals_narrow_with_more_rounds_and_cover_what_is_drawn() -> None:
    draws = np.random.default_rng(3)
    widths = []
    for count in (5, 80, 1000):
        low, high = interval(np.median, draws.normal(10.0, 1.0, count))
        assert low < 10.0 < high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert interval(np.median, [2.0] * 5) == (2.0, 2.0)
    assert interval(np.median, [3.0]) == (3.0, 3.0)  # of one round nothing can be told
    assert Timing((4.0,)).low == 4.0 == Timing((4.0,)).high


def test_nine_of_ten_intervals_of_a_median_hold_it() -> None:
    """Of five rounds the percentile interval goes about from the first to the last: 94 % hold the median."""
    draws = np.random.default_rng(7)
    held = [
        low < 0.0 < high for low, high in (interval(np.median, draws.normal(0.0, 1.0, 5)) for _ in range(100))
    ]
    assert 0.85 <= sum(held) / len(held) <= 1.0


def test_paired_samples_are_drawn_together() -> None:
    ours = np.arange(1.0, 41.0)
    low, high = interval(ratio_of_means, ours, 2 * ours, paired=True)
    assert low == high == pytest.approx(0.5)
    low, high = interval(ratio_of_means, ours, 2 * ours)
    assert low < 0.45 < 0.55 < high


def test_a_share_of_all_requests_is_not_certain() -> None:
    assert share_interval(1.0, 60) == (pytest.approx(0.9404, abs=1e-4), 1.0)
    low, high = share_interval(0.9, 100)
    assert (low, high) == (pytest.approx(0.8238, abs=1e-4), pytest.approx(0.9510, abs=1e-4))
    assert share_interval(0.0, 0) == (0.0, 0.0)


def test_every_ratio_has_at_least_five_rounds() -> None:
    rounds = (FULL.rounds, FULL.slow_rounds, FULL.train_rounds, FULL.streams_rounds, FULL.restarts)
    sizes = AdapterSizes.of(FULL, shape_named("255m"), quick=False)
    assert min(*rounds, sizes.rounds, sizes.train_rounds, SwapSizes().rounds) >= 5
    assert min(instead._ROUNDS, 1 + run._AGAIN) >= 5


def test_a_json_says_what_its_spreads_are() -> None:
    results = Results({}, None, {"a": None, "b": None, "c": None, "d": None})
    results.row("a", 1.0, (0.5, 1.5))
    results.row("b", 1.0, (0.5, 1.5), spread_is=OF_REQUESTS)
    results.row("c", 1.0)
    found = results.as_dict()["spreads_are"]
    assert found.pop("figures").endswith("unless noted")
    assert found == {"a": OF_ROUNDS, "b": OF_REQUESTS}
    results.ratio("c", ratio_of([1.0, 2.0, 3.0, 4.0, 5.0]))
    results.ratio("d", ratio_of([1.0, 2.0, 3.0]))  # which hold the median with a probability of 0.75
    found = results.as_dict()["spreads_are"]
    assert (found["c"], found["d"]) == (OF_ROUNDS, "least and greatest of the median's 3 rounds")
    older = {"d": 2.0, "spreads": {"d": [1, 3]}, "notes": {}, "series": {}, "figures": {}, "groups": []}
    results.header["groups"] = []
    results.take_over(older)
    assert results.as_dict()["spreads_are"]["d"] == "least and greatest round"


def test_a_rate_is_compared_with_the_floor_of_now() -> None:
    results, floor = Results({}), 50.0
    assert "inference.vs_floor" not in results.as_dict()
    results.figure("inference.ours", 30.0, "output tokens/s", (20.0, 40.0), lambda: floor)
    found = results.as_dict()
    assert found["inference.vs_floor"] == 0.6 and not found["met"]["inference.vs_floor"]
    assert found["spreads"]["inference.vs_floor"] == (0.4, 0.8)
    floor = 40.0  # of a machine that was slower than it had seemed
    assert results.as_dict()["inference.vs_floor"] == 0.75 and results.as_dict()["met"]["inference.vs_floor"]


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([7.0], 0.99) == 7.0


def test_bars_know_their_direction() -> None:
    assert Bar(2.0).is_met(2.0) and not Bar(2.0).is_met(1.9)
    assert Bar(0.1, at_most=True).is_met(0.1) and not Bar(0.1, at_most=True).is_met(0.2)


def test_a_row_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(AssertionError, match="came out as nan"):
        Results({}).row(next(iter(BARS)), float("nan"))


def test_an_answer_keeps_its_bounds_token_by_token() -> None:
    answer = AnswerTimes(arrival=10.0, tokens=[10.5, 10.6, 10.9])
    assert answer.keeps(SLO(first_token=0.5, between_tokens=0.31))
    assert not answer.keeps(SLO(first_token=0.4))
    assert not answer.keeps(SLO(between_tokens=0.29))


def test_rates_count_what_came_within_the_load() -> None:
    """A step's fine-tuning tokens came evenly since the step before; the last one's half within the load."""
    answers = [AnswerTimes(0.0, [100.5, 101.5, 102.5]), AnswerTimes(0.0, [101.0])]
    load = LoadResult(
        100.0, 2.0, answers, trained=[(102.5, 98.0), (100.5, 10.0), (101.5, 20.0), (100.5, 20.0)]
    )
    assert load.output_rate() == pytest.approx(1.5)
    assert load.training_rate() == pytest.approx((30.0 + 20.0 + 49.0) / 2)
    assert load.training_rate(0.5, 1.0) == pytest.approx(10.0 + 49.0)
    assert load.training_rate(0.0, 0.125) == pytest.approx(15.0 / 0.25)
    assert load.per_second() == [(0.0, 1.0, 30.0), (1.0, 2.0, 20.0)]
    assert load.overall_training_rate() == pytest.approx((30.0 + 20.0 + 98.0) / 2.5)  # until the last answer
    load.is_apart = True
    assert load.overall_training_rate() == load.training_rate()
    assert LoadResult(100.0, 2.0, trained=[(101.0, 8.0)]).overall_training_rate() == pytest.approx(4.0)


def test_shapes_count_their_parameters() -> None:
    shape = shape_named("tiny")
    first, second = shape.build(), shape.build()
    assert shape.parameters == sum(p.numel() for p in first.parameters())
    assert shape_named("255m").parameters == 254_313_472
    for mine, yours in zip(first.parameters(), second.parameters(), strict=True):
        assert mine.equal(yours) and mine.data_ptr() != yours.data_ptr()


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"there are 70b, .*8b, qwen3-8b, 1\.5b, 600m, 780m, 255m, 19m, tiny"
    ):
        shape_named("huge")


class Announcing:
    """The part of an engine that `announced` uses."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        executor = ScriptedExecutor(16)
        executor.pause_training = self.asked.set  # type: ignore[method-assign]
        self.arrivals = Arrivals(executor)
        self.clock = time.monotonic
        self.scheduler = SimpleNamespace(config=SchedulerConfig(layers=4, max_positions=64))


@pytest.mark.parametrize("after", [-1.0, 0.0, 0.05])
def test_who_arrives_during_a_step_is_announced_until_it_ends(after: float) -> None:
    it = Announcing()
    arrival = it.clock() + after
    with announced(cast(Engine, it), lambda _: arrival):
        assert it.asked.wait(PATIENCE)
        assert it.arrivals._coming == 1
    assert it.arrivals._coming == 0


@pytest.mark.parametrize("after", [0.9, 60.0, float("inf")])
def test_who_arrives_after_a_step_is_not_announced(after: float) -> None:
    it = Announcing()
    arrival = it.clock() + after
    with announced(cast(Engine, it), lambda _: arrival):
        pass
    assert not it.asked.is_set() and it.arrivals._coming == 0
