from dataclasses import replace

from coserve.core.plan import BasePlan, Lane, OptimStep
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import inference_segment, training_segment

ANSWER = inference_segment(Sequence(1, Request("r", (1,))), 0, 1)
TRAINING = training_segment(MicroBatch(2, "job", "a@0", (8,), 2), 0, 8, Direction.TRAIN_FORWARD, Span(0, 2))


def test_one_lane_has_all_the_machine() -> None:
    """Windows forward share the pass of answers, but for those that arrivals abandon."""
    back = replace(TRAINING, direction=Direction.BACKWARD)
    plan = BasePlan((ANSWER,), (back, TRAINING), slice_layers=2)
    assert plan.lanes == (Lane(1.0, (ANSWER,), (back,), (TRAINING,), 2),)
    assert plan.is_fused
    (lane,) = replace(plan, abandons=True).lanes
    assert (lane.fused, lane.sliced, lane.training) == ((), (back, TRAINING), (back, TRAINING))
    (lane,) = replace(plan, inference=()).lanes
    assert (lane.fused, lane.sliced) == ((), (back, TRAINING))


def test_two_lanes_share_it_out() -> None:
    plan = BasePlan((ANSWER,), (TRAINING,), split=0.75)
    assert plan.lanes == (Lane(0.75, (ANSWER,), ()), Lane(0.25, (), (TRAINING,)))
    assert not plan.is_fused, "each lane passes over the weights by itself"


def test_a_pause_does_nothing() -> None:
    assert BasePlan(idle=3.0).is_empty and BasePlan(split=0.5).is_empty
    assert not BasePlan(updates=(OptimStep("job"),)).is_empty and not BasePlan(released=(1,)).is_empty
