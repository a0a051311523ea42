from dataclasses import replace

from coserve.core.plan import BasePlan, OptimStep
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import inference_segment, training_segment

ANSWER = inference_segment(Sequence(1, Request("r", (1,))), 0, 1)
TRAINING = training_segment(MicroBatch(2, "job", "a@0", (8,), 2), 0, 8, Direction.TRAIN_FORWARD, Span(0, 2))


def test_windows_forward_share_the_pass_of_answers_but_for_those_that_arrivals_abandon() -> None:
    back = replace(TRAINING, direction=Direction.BACKWARD)
    plan = BasePlan((ANSWER,), (back, TRAINING), slice_layers=2)
    assert plan.fused == (TRAINING,) and plan.is_fused
    others = (replace(plan, apart=True), replace(plan, abandons=True), replace(plan, inference=()))
    assert [other.fused for other in others] == [(), (), ()]


def test_beside_each_other_answers_and_training_share_no_pass() -> None:
    plan = BasePlan((ANSWER,), (TRAINING,), share=0.75)
    assert not plan.fused and not plan.is_fused


def test_a_pause_does_nothing() -> None:
    assert BasePlan(idle=3.0).is_empty and BasePlan(share=0.5).is_empty
    assert not BasePlan(updates=(OptimStep("job"),)).is_empty and not BasePlan(released=(1,)).is_empty
