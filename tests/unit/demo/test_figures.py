"""Rates from the scheduler's counters, and figures of a load."""

import pytest

from coserve.demo.figures import BINS, DemoReport, RateMeter, StepLoss, rates, way
from coserve.schedule.stats import Stats
from coserve.simulate.replay import AnswerTimes, LoadResult


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


def test_a_meter_shows_the_last_seconds() -> None:
    stats = Stats(decode_tokens=1000)
    meter = RateMeter(stats, now=0.0)
    for second in range(1, 21):
        stats.decode_tokens += 10 if second <= 10 else 30
        recent = meter.now(stats, float(second))
    assert recent.decode == pytest.approx(30.0)


def load_of(*answers: AnswerTimes, trained: float = 0.0) -> LoadResult:
    """A load of 60 s, one for each bin, that began at 100."""
    return LoadResult(100.0, 60.0, list(answers), [(160.0, trained)], finished_at=161.0)


ALONE = load_of(AnswerTimes(100.0, [101.0, 102.0]), AnswerTimes(130.0, [131.0, 132.0, 133.0]))


def test_a_way_counts_answers_and_what_was_trained() -> None:
    beside = load_of(AnswerTimes(100.0, [102.0, 104.0]), AnswerTimes(130.0), trained=600.0)
    found = way("coserve", beside, [StepLoss(10.0, "a", 2.0), StepLoss(60.5, "a", 1.0)], ALONE, 1.5, 2)
    assert (found.answers, found.unanswered, found.training_tokens_per_second) == (1, 1, 10.0)
    assert found.steps == 1  # the other one came after the load's time
    assert (found.first_token, found.between_tokens) == ((2.0, 2.0), (2.0, 2.0))


def test_an_answer_is_compared_with_the_same_one_alone_by_its_tokens() -> None:
    """An adapter answers at another length: 6 s of four tokens are half as slow again as 2 s of two."""
    beside = load_of(AnswerTimes(100.0, [101.0, 102.0, 103.0, 106.0]), AnswerTimes(130.0, [134.0, 138.0]))
    found = way("coserve", beside, [], ALONE, 1.5, 2)
    assert found.slowdown == pytest.approx((1.5 + 4.0) / 2) and found.kept == 0.5
    assert found.losses == [None] * BINS


def test_nothing_answered_and_nothing_compared_is_none() -> None:
    found = way("coserve", load_of(AnswerTimes(100.0), AnswerTimes(130.0)), [], ALONE, 1.5, 2)
    assert (found.first_token, found.slowdown, found.kept) == (None, None, None)
    assert way("alone", ALONE, [], None, 1.5, 2).slowdown is None


def test_requests_that_were_never_asked_are_unanswered_too() -> None:
    """A step that lasted beyond the end of the load, as on a busy machine."""
    found = way("coserve", load_of(AnswerTimes(100.0, [102.0, 104.0])), [], ALONE, 1.5, 2)
    assert (found.answers, found.unanswered, found.slowdown) == (1, 1, 2.0)


def test_waits_are_the_longest_in_each_part_of_the_time() -> None:
    load = load_of(AnswerTimes(100.0, [100.5, 103.2]), AnswerTimes(100.1, [100.9, 103.9, 160.0]))
    waits = way("alone", load, [], None, 1.5, 2).waits
    assert len(waits) == BINS and waits[0] == pytest.approx(0.8) and waits[3] == pytest.approx(3.0)
    assert [place for place, wait in enumerate(waits) if wait is not None] == [0, 3]


def test_losses_are_the_mean_of_the_newest_once_each_adapter_has_one() -> None:
    steps = [StepLoss(0.5, "a", 4.0), StepLoss(1.5, "b", 2.0), StepLoss(3.5, "a", 1.0)]
    losses = way("coserve", ALONE, steps, ALONE, 1.5, 2).losses
    assert losses[:5] == [None, 3.0, 3.0, 1.5, 1.5] and losses[-1] == 1.5


@pytest.mark.parametrize(("load", "busy"), [(None, False), (0.1, False), (0.4, False), (0.6, True)])
def test_a_machine_with_other_work_is_busy(load: float | None, busy: bool) -> None:
    assert DemoReport(processors=2, busy=load).is_busy is busy
