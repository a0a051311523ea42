"""The margin: covers what it promises, follows the machine, and forgets what is no longer tried."""

import math
import random
from dataclasses import replace

import pytest

from coserve.core.plan import BasePlan, BaseResult, OptimStep
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import StepFeatures
from coserve.schedule.segments import inference_segment, training_segment
from coserve.schedule.step_costs import HISTORY, WINDOW, Margin, StepCosts, quantile, share_of_steps
from steps import step_costs, step_plan, step_result

CONFIG = SchedulerConfig(layers=4, max_positions=512)


def fed(ratios: list[float], trains: bool = True) -> Margin:
    margin = Margin()
    for ratio in ratios:
        margin.observe(ratio, trains)
    return margin


@pytest.mark.parametrize("share", [0.9, 0.99, 0.999])
def test_the_share_asked_for_is_covered(share: float) -> None:
    draw = random.Random(1)
    windows = [[1.0 + draw.expovariate(5.0) for _ in range(WINDOW)] for _ in range(200)]
    missed = sum(math.exp(-5.0 * (quantile(window, share) - 1.0)) for window in windows) / len(windows)
    assert missed == pytest.approx(1.0 - share, rel=0.5)


def test_a_rarer_miss_than_any_that_was_seen_is_allowed_for() -> None:
    draw = random.Random(2)
    seen = [1.0 + draw.random() for _ in range(100)]
    assert quantile(seen, 0.9) <= max(seen) < quantile(seen, 0.9999)
    assert quantile([1.25] * 50, 0.999) == 1.25
    assert quantile([3.0], 0.5) == 3.0


def test_quick_steps_ask_for_no_margin_and_unknown_ones_for_some() -> None:
    assert fed([0.7] * 50).covering(0.99, trains=True) == 0.0
    assert fed([]).covering(0.99, trains=True) == fed([9.0] * 3).covering(0.99, trains=True) > 0.0


def test_steps_that_train_are_judged_by_their_own() -> None:
    margin = fed([1.0] * 50, trains=False)
    for _ in range(50):
        margin.observe(1.6, trains=True)
    assert margin.covering(0.99, trains=False) == 0.0
    assert margin.covering(0.99, trains=True) == pytest.approx(0.6)


def test_a_busy_spell_is_noticed_and_forgotten() -> None:
    margin = fed([1.0] * WINDOW)
    for _ in range(20):
        margin.observe(2.5, trains=True)
    assert margin.covering(0.99, trains=True) >= 1.0
    for _ in range(WINDOW):
        margin.observe(1.0, trains=True)
    assert margin.covering(0.99, trains=True) == 0.0


def test_training_that_was_cut_short_finds_out_that_the_machine_is_free_again() -> None:
    margin = fed([4.0] * 100, trains=True)
    for _ in range(WINDOW):
        margin.observe(1.1, trains=False)
    assert margin.covering(0.99, trains=True) == pytest.approx(0.1)


def observe(cost: StepCosts, plan: BasePlan, seconds: float, host: float = 0.0) -> None:
    cost.observe(StepFeatures.of(step_plan(plan)), step_result(BaseResult(seconds)), host)


def test_the_cost_model_tells_both_kinds_apart_and_stops_at_the_most() -> None:
    cost = step_costs()
    sequence = Sequence(1, Request("r", (1,) * 8), output=[1])
    decode = inference_segment(sequence, 8, 1)
    window = training_segment(
        MicroBatch(2, "job", "t@0", (64,), 4), 0, 32, Direction.TRAIN_FORWARD, Span(0, 2)
    )
    alone, beside = BasePlan((decode,)), BasePlan((decode,), (window,))
    for _ in range(60):
        observe(cost, alone, cost.first.predict(alone))
        observe(cost, beside, 1.4 * cost.first.predict(beside))
    assert cost.margin(CONFIG, trains=False) < cost.margin(CONFIG, trains=True) < 0.5
    for _ in range(60):
        cost.misses.observe(4.0, trains=True)
    assert cost.margin(CONFIG, trains=True) == CONFIG.max_margin


def test_steps_that_nobody_waits_for_say_nothing() -> None:
    """An optimizer step alone is over in milliseconds, and takes three times as long now and then."""
    cost, sequence = step_costs(), Sequence(1, Request("r", (1,) * 8), output=[1])
    decode = BasePlan((inference_segment(sequence, 8, 1),))
    update = BasePlan(updates=(OptimStep("a"),))
    for _ in range(40):
        observe(cost, decode, cost.first.predict(decode))
        observe(cost, update, 3.0 * cost.first.predict(update))
    assert cost.margin(CONFIG, trains=True) == pytest.approx(0.0, abs=1e-9)
    for _ in range(40):
        both = replace(decode, updates=(OptimStep("a"),))
        observe(cost, both, 1.5 * cost.first.predict(both))
    assert cost.margin(CONFIG, trains=True) > 0.1


def test_a_rare_long_step_counts_for_long_where_so_rare_a_step_does() -> None:
    margin = fed([1.0] * 100 + [1.6] + [1.0] * (HISTORY - 1))
    assert margin.covering(0.99, trains=True) == 0.0  # one of a hundred is allowed to be late
    assert margin.covering(0.9997, trains=True) == pytest.approx(0.6)
    margin.observe(1.0, trains=True)  # and now it is forgotten
    assert margin.covering(0.9997, trains=True) == 0.0


def test_answers_of_many_tokens_need_each_step_in_time() -> None:
    assert share_of_steps(0.99, 1) == pytest.approx(0.99)
    assert share_of_steps(0.99, 32) ** 32 == pytest.approx(0.99, abs=1e-4)
    assert share_of_steps(0.99, 10_000) == share_of_steps(0.99, 256)


def test_what_the_host_takes_is_predicted_too_and_a_stall_counts_for_little() -> None:
    cost, sequence = step_costs(), Sequence(1, Request("r", (1,) * 8), output=[1])
    decode = BasePlan((inference_segment(sequence, 8, 1),))
    executed, weights = cost.first.predict(decode), cost.first.weights
    for _ in range(60):
        observe(cost, decode, executed, 0.002)
    assert cost.predict(step_plan(decode)) == pytest.approx(executed + 0.002)
    assert cost.first.weights == pytest.approx(weights)
    assert cost.margin(CONFIG, trains=False) < 0.1  # for the first step, which nobody knew anything of
    observe(cost, decode, executed, 5.0)
    assert 0.002 < cost.host < 0.002 + 0.05 * 4 * (executed + 0.002)
    assert cost.margin(CONFIG, trains=False, tokens=100) == CONFIG.max_margin
    before = cost.host
    observe(cost, BasePlan(updates=(OptimStep("a"),)), 0.005, 1.0)  # nobody waits for its tokens
    assert cost.host == before
