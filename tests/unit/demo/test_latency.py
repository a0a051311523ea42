"""Waits on scripted times."""

import pytest

from coserve.core.request import SLO
from coserve.demo.latency import Latencies, figures_of, percentile


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
    seen = Latencies(SLO(between_tokens=0.5))
    for key, slow in ((1, 0.5), (2, 0.75)):
        seen.asked(key, 0.0)
        seen.token(key, 5.0)  # no bound is on the first token
        seen.token(key, 5.25)
        seen.token(key, 5.25 + slow)
        seen.ended(key, 5.25 + slow)
    assert (seen.answers, seen.kept) == (2, 1)
    assert figures_of(seen.gaps, 0.5).within == 0.75


def test_an_answer_keeps_the_bound_on_its_first_token_too() -> None:
    seen = Latencies(SLO(first_token=1.0, between_tokens=0.5))
    for key, first in ((1, 1.0), (2, 1.25)):
        seen.asked(key, 0.0)
        seen.token(key, first)
        seen.ended(key, first)
    seen.asked(3, 0.0)
    seen.ended(3, 2.0)  # without a token, later than one was due
    assert (seen.answers, seen.kept) == (3, 1)


def test_an_answer_under_way_is_unanswered_and_late_where_it_broke_a_bound() -> None:
    seen = Latencies(SLO(first_token=2.0, between_tokens=0.5))
    seen.asked(1, 0.0)
    for at in (1.0, 3.0, 3.25):  # one gap was too long
        seen.token(1, at)
    seen.asked(2, 2.75)
    seen.token(2, 3.0)  # nothing late, until its next token is
    seen.asked(3, 2.75)  # nothing late, until its first token is
    assert (seen.answers, seen.kept, seen.unanswered) == (0, 0, 3)
    assert [seen.late(now) for now in (3.25, 3.5, 3.75, 4.75, 5.0)] == [1, 1, 2, 2, 3]


def test_a_percentile_can_look_back_on_the_newest_only() -> None:
    seen = Latencies()
    seen.asked(1, 0.0)
    for at in (1.0, 9.0, 9.5, 10.0):
        seen.token(1, at)
    assert seen.gap(0.99, newest=10) == 8.0
    assert seen.gap(0.99, newest=2) == 0.5


def test_the_share_within_a_bound_includes_waits_that_equal_it() -> None:
    assert figures_of([0.5, 1.0, 1.5, 9.0], 1.0).within == 0.5
    assert figures_of([0.5], None).within is None


def test_no_wait_is_no_share() -> None:
    empty = figures_of([], 1.0)
    assert (empty.within, empty.p50, empty.bound) == (None, None, 1.0)


def test_a_token_of_nobody_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Latencies().token(1, 0.0)
