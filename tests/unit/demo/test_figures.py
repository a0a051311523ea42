"""Rates from the scheduler's counters."""

import pytest

from coserve.demo.figures import Bounds, RateMeter, phase, rates
from coserve.demo.latency import Latencies
from coserve.schedule.stats import Stats


def test_a_training_token_counts_once_it_has_been_there_and_back() -> None:
    before = Stats(kept_rows=100.0, backward_rows=50.0)
    after = Stats(kept_rows=500.0, backward_rows=450.0, decode_tokens=80, prefill_tokens=20)
    measured = rates(before, after, 4.0)
    assert (measured.training, measured.decode, measured.prefill) == (100.0, 20.0, 5.0)


def test_no_training_is_exactly_none() -> None:
    """The counters are sums of fractions: in another order their difference would be 3e-17, and be shown."""
    still = Stats(kept_rows=0.1, backward_rows=0.2)
    assert rates(still, still, 1.0).training == 0.0


def test_the_fused_share_is_of_the_steps_that_could_carry_both() -> None:
    assert rates(Stats(), Stats(fused_steps=3, fused_possible=4), 1.0).fused == 0.75
    assert rates(Stats(), Stats(steps=9), 1.0).fused is None


def test_a_meter_shows_the_last_seconds_and_remembers_all() -> None:
    stats = Stats()
    meter = RateMeter(stats, now=0.0)
    for second in range(1, 21):
        stats.decode_tokens += 10 if second <= 10 else 30
        recent = meter.now(stats, float(second))
    assert recent.decode == pytest.approx(30.0)
    assert meter.total(stats, 20.0).decode == pytest.approx(20.0)


def test_a_meter_is_not_fooled_by_counters_that_go_on() -> None:
    stats = Stats(decode_tokens=1000)
    meter = RateMeter(stats, now=5.0)
    stats.decode_tokens += 7
    assert meter.total(stats, 6.0).decode == 7.0


def test_a_phase_without_a_bound_has_no_attainment() -> None:
    closed = phase(Latencies(), rates(Stats(), Stats(), 2.0), 2.0, now=2.0)
    assert closed.between_tokens.within is None and closed.answers_within is None
    assert closed.between_tokens.p99 is None and closed.output_tokens_per_second == 0.0


def test_a_phase_with_a_bound_says_how_often_it_held() -> None:
    seen = Latencies(Bounds(first_token=2.0, between_tokens=1.0).slo)
    seen.asked(1, 0.0)
    for at in (1.0, 1.5, 3.5):
        seen.token(1, at)
    seen.ended(1, 3.5)
    seen.asked(2, 1.0)
    seen.asked(3, 3.0)
    closed = phase(seen, rates(Stats(), Stats(), 4.0), 4.0, now=4.0)
    assert (closed.first_token.within, closed.between_tokens.within, closed.answers_within) == (1.0, 0.5, 0.0)
    assert (closed.answers, closed.unanswered, closed.unanswered_late) == (1, 2, 1)
    assert closed.output_tokens_per_second == 0.75
