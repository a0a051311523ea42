"""Waits on scripted times."""

import pytest

from coserve.demo.latency import Latencies, percentile


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 1.0) == 100.0
    assert percentile([7.0], 0.01) == 7.0
    assert percentile([], 0.5) is None


def test_first_tokens_and_gaps_of_two_answers_are_kept_apart() -> None:
    seen = Latencies()
    seen.asked(1, 10.0)
    seen.asked(2, 10.5)
    seen.token(1, 11.0)
    seen.token(2, 11.0)
    seen.token(1, 11.25)
    seen.token(2, 12.0)
    assert seen.firsts == [1.0, 0.5]
    assert seen.gaps == [0.25, 1.0]
    assert seen.tokens == 4


def test_an_answer_keeps_the_bound_if_every_gap_does() -> None:
    seen = Latencies(slo=0.5)
    for key, slow in ((1, 0.5), (2, 0.75)):
        seen.asked(key, 0.0)
        seen.token(key, 5.0)  # the first token may take as long as it likes
        seen.token(key, 5.25)
        seen.token(key, 5.25 + slow)
        seen.ended(key)
    assert (seen.answers, seen.kept) == (2, 1)
    assert seen.gaps_within(0.5) == 0.75


def test_an_answer_under_way_counts_neither_way() -> None:
    seen = Latencies(slo=0.1)
    seen.asked(1, 0.0)
    seen.token(1, 1.0)
    seen.token(1, 3.0)
    assert (seen.answers, seen.kept) == (0, 0)
    assert seen.gap(0.99) == 2.0


def test_a_percentile_can_look_back_on_the_newest_only() -> None:
    seen = Latencies()
    seen.asked(1, 0.0)
    for at in (1.0, 9.0, 9.5, 10.0):
        seen.token(1, at)
    assert seen.gap(0.99) == 8.0
    assert seen.gap(0.99, newest=2) == 0.5


def test_no_gap_is_no_share() -> None:
    assert Latencies(slo=1.0).gaps_within(1.0) is None


def test_a_token_of_nobody_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Latencies().token(1, 0.0)
