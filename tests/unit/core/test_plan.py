from dataclasses import replace

from coserve.core.plan import BasePlan, OptimStep, Passes
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import inference_segment, training_segment

ANSWER = inference_segment(Sequence(1, Request("r", (1,))), 0, 1)
PROMPT = inference_segment(Sequence(3, Request("p", (1, 2, 3))), 0, 3)
TRAINING = training_segment(MicroBatch(2, "job", "a@0", (8,), 2), 0, 8, Direction.TRAIN_FORWARD, Span(0, 2))


def test_windows_forward_share_the_pass_of_answers_where_the_plan_says_so() -> None:
    back = replace(TRAINING, direction=Direction.BACKWARD)
    plan = BasePlan((ANSWER,), (back, TRAINING), slice_layers=2)
    assert plan.fused == (TRAINING,) and plan.is_fused
    assert not replace(plan, inference=()).fused
    assert not replace(plan, passes=Passes(windows_apart=True)).fused
    decodes_apart = replace(plan, passes=Passes(decodes_apart=True))
    assert not decodes_apart.fused, "no answer's row is left to share with"
    prompt = replace(decodes_apart, inference=(ANSWER, PROMPT))
    assert prompt.fused == (TRAINING,)
    assert not replace(prompt, passes=Passes(True, True)).fused


def test_beside_each_other_answers_and_training_share_no_pass() -> None:
    plan = BasePlan((ANSWER,), (TRAINING,), share=0.75)
    assert not plan.fused and not plan.is_fused


def test_a_pause_does_nothing() -> None:
    assert BasePlan(idle=3.0).is_empty and BasePlan(share=0.5).is_empty
    assert not BasePlan(updates=(OptimStep("job"),)).is_empty and not BasePlan(released=(1,)).is_empty
