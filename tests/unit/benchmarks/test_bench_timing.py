import pytest

from coserve.core.request import SLO
from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.drive import AnswerTimes, LoadResult
from coserve_benchmarks.results import BARS, Bar, Results
from coserve_benchmarks.timing import Timing, alternate, percentile, speedup


def test_contestants_take_turns_and_warm_up() -> None:
    order: list[str] = []

    def contestant(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    contestants = {"a": lambda: contestant("a", 1.0), "b": lambda: contestant("b", 3.0)}
    times = alternate(contestants, rounds=2, threads=1)
    assert order == ["a", "b"] * 3
    assert times["b"].seconds == (3.0, 3.0)


def test_speedup_is_of_medians_and_its_spread_of_neighbours() -> None:
    ratio = speedup(Timing((1.0, 2.0, 1.0)), Timing((3.0, 4.0, 5.0)))
    assert (ratio.value, ratio.low, ratio.high) == (4.0, 2.0, 5.0)


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
    with pytest.raises(ConfigError, match="there are 255m, 19m, tiny"):
        shape_named("huge")
