"""Interference, computed by hand, and the cost model's learning from a step with a share."""

from dataclasses import replace

import pytest

from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, OptimStep, TrainingSegment
from coserve.core.request import BASE, Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.cost import Interference
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.segments import inference_segment, training_segment
from coserve.schedule.step_costs import StepCosts
from steps import step_costs, step_plan, step_result

# A row there takes a second on the whole machine, a row back two, an optimizer step one.
COSTS = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {
    "forward_rows": 1.0,
    "window_rows": 1.0,
    "backward_rows": 2.0,
    "updates": 1.0,
}
SEQUENCE = Sequence(1, Request("r", (1,) * 4))
ANSWER = inference_segment(SEQUENCE, 0, 4)
BATCH = MicroBatch(2, "a", "a@0", (3,), 2, direction=Direction.BACKWARD, frontier=3)
TRAINING = training_segment(BATCH, 0, 3, Direction.BACKWARD, Span(0, 2))


def plan(
    *segments: InferenceSegment | TrainingSegment, predicted: float = 10.0, updates: tuple[str, ...] = ()
) -> BasePlan:
    answers = tuple(s for s in segments if isinstance(s, InferenceSegment))
    training = tuple(s for s in segments if isinstance(s, TrainingSegment))
    return BasePlan(answers, training, updates, predicted=predicted, share=0.5)


def observe(model: StepCosts, plan: BasePlan, result: BaseResult) -> None:
    model.observe_beside(step_plan(plan), step_result(result))


def test_a_factor_moves_by_a_twentieth_of_what_a_step_shows() -> None:
    it = Interference()
    it.observe_inference(2.8)
    assert (it.inference, it.training) == (pytest.approx(1.85), 1.8)
    it.observe_training(1.4)
    assert (it.inference, it.training) == (pytest.approx(1.85), pytest.approx(1.78))


@pytest.mark.parametrize(("seen", "counted"), [(1000.0, 4.0), (4.0, 4.0), (0.0, 0.25), (0.25, 0.25)])
def test_a_step_that_was_held_up_teaches_no_more_than_a_slow_one(seen: float, counted: float) -> None:
    it = Interference()
    it.observe_inference(seen)
    it.observe_training(seen)
    assert it.inference == it.training == pytest.approx(1.8 + 0.05 * (counted - 1.8))


def test_factors_come_to_what_steps_show() -> None:
    it = Interference()
    for _ in range(200):
        it.observe_inference(1.5)
        it.observe_training(3.0)
    assert it.inference == pytest.approx(1.5, rel=1e-3) and it.training == pytest.approx(3.0, rel=1e-3)


def test_the_model_learns_what_each_took_more_than_alone() -> None:
    """They take 4 and 6 seconds alone; here 8 and 9, so twice and one and a half times."""
    model = step_costs(COSTS)
    before = model.first.learned
    observe(model, plan(ANSWER, TRAINING), BaseResult(9.0, trained=(TRAINING,), stream_seconds=(8.0, 9.0)))
    assert model.first.interference.inference == pytest.approx(1.8 + 0.05 * (2.0 - 1.8))
    assert model.first.interference.training == pytest.approx(1.8 + 0.05 * (1.5 - 1.8))
    slower = (model.first.interference.inference, model.first.interference.training)
    assert model.first.learned == replace(
        before, interference=slower
    )  # what a step costs alone shows in other steps
    other = step_costs(COSTS)
    other.first.recall(model.first.learned)
    assert (other.first.interference.inference, other.first.interference.training) == slower


def test_training_that_goes_on_is_judged_when_it_is_done() -> None:
    """By what has been done, whichever step it began in."""
    model = step_costs(COSTS)
    observe(model, plan(ANSWER, TRAINING), BaseResult(8.0, stream_seconds=(8.0, 0.0)))
    assert (model.first.interference.inference, model.first.interference.training) == (
        pytest.approx(1.81),
        1.8,
    )
    observe(model, plan(ANSWER), BaseResult(7.2, trained=(TRAINING,), stream_seconds=(7.2, 18.0)))
    assert model.first.interference.inference == pytest.approx(1.81 + 0.05 * (1.8 - 1.81))
    assert model.first.interference.training == pytest.approx(1.8 + 0.05 * (3.0 - 1.8))


def test_the_margin_knows_of_steps_with_a_share_too() -> None:
    """20 seconds where 10 were predicted: as much as before is allowed for on top."""
    model = step_costs(COSTS)
    for _ in range(16):
        observe(
            model, plan(ANSWER, TRAINING), BaseResult(20.0, trained=(TRAINING,), stream_seconds=(20.0, 19.0))
        )
    assert model.misses.covering(0.9, trains=True) == pytest.approx(1.0)


def test_a_step_with_a_share_in_which_nothing_was_done_teaches_nothing() -> None:
    model = step_costs(COSTS)
    for segments in ((), (ANSWER,), (TRAINING,)):
        observe(model, plan(*segments), BaseResult(9.0))
    assert (model.first.interference.inference, model.first.interference.training) == (1.8, 1.8)


def test_no_step_waits_for_training_beside_its_inference() -> None:
    """4 seconds by 1.5 beside 6 by 2, which are waited for alone; an optimizer step comes on top."""
    model = step_costs(COSTS)
    model.first.interference.inference, model.first.interference.training = 1.5, 2.0
    builder = PlanBuilder(0.0, share=0.5)
    builder.add(SEQUENCE, 4)
    assert builder.predict(model) == 6.0
    builder.add_training(BATCH, TRAINING)
    assert builder.predict(model) == 6.0
    builder.add_update(BASE, OptimStep("a"))
    assert builder.predict(model) == 7.0
    builder.inference.clear()
    assert builder.predict(model) == 13.0
    builder.training.clear()
    assert builder.predict(model) == 1.0
