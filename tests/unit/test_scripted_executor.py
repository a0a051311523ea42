"""The fake executor must refuse what a real one could not run."""

from dataclasses import replace

import pytest

from coserve.core.plan import BasePlan, OptimStep
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import announce_batches, inference_plan, training_segment
from scripted_executor import ScriptedExecutor, next_token

SPAN, TAIL = Span(0, 2), Span(2, 3)


def sequence(key: int = 1, pages: tuple[int, ...] = (0, 1)) -> Sequence:
    return Sequence(key, Request("r", (4, 5, 6)), pages=list(pages))


ONE = sequence()


def infer(*rows: tuple[Sequence, int, int], released: tuple[int, ...] = ()) -> BasePlan:
    return replace(inference_plan(rows), released=released)


def train(it: MicroBatch, start: int, rows: int, way: Direction, span: Span = SPAN) -> BasePlan:
    window = training_segment(it, start, rows, way, span)
    return BasePlan(training=(window,), micro_batches=announce_batches([it]))


def batch() -> MicroBatch:
    return MicroBatch(7, "job", "a@0", (8,), 2)


def test_tokens_follow_from_tokens() -> None:
    executor, it = ScriptedExecutor(2), sequence()
    assert executor.run(infer((it, 0, 2))).sampled[1].tokens == ()
    assert executor.run(infer((it, 2, 1))).sampled[1].tokens == (next_token((4, 5, 6), 1000),)
    assert executor.now > 0


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(sequence(pages=(0,)), 0, 3)], "page is missing"),
        ([(sequence(), 1, 1)], "rows in order"),
        ([(sequence(), 0, 4)], "not known"),
        ([(sequence(), 0, 3), (sequence(2, (1, 2)), 0, 3)], "shared"),
        ([(ONE, 0, 1), (ONE, 1, 1)], "one segment"),
        ([(sequence(), 0, 1), (sequence(), 0, 1)], "one segment"),
    ],
)
def test_inference_that_cannot_run(segments: list[tuple[Sequence, int, int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        ScriptedExecutor(2).run(infer(*segments))


def test_a_sequence_is_named_once() -> None:
    executor = ScriptedExecutor(2)
    executor.run(infer((sequence(), 0, 2)))
    with pytest.raises(AssertionError, match="named once"):
        executor.run(infer((sequence(), 2, 1)))


def test_pages_that_were_not_filled_again() -> None:
    executor, it = ScriptedExecutor(2), sequence()
    executor.run(infer((it, 0, 2)))
    executor.run(infer((sequence(2, (0, 1)), 0, 3), released=(1,)))
    with pytest.raises(AssertionError, match="no plan has named"):
        executor.run(infer((it, 2, 1), released=(2,)))
    with pytest.raises(AssertionError, match="rows in order"):
        executor.run(infer((sequence(), 2, 1)))


def test_the_ended_stay_away() -> None:
    executor, it = ScriptedExecutor(2), batch()
    executor.run(train(it, 0, 8, Direction.TRAIN_FORWARD))
    with pytest.raises(AssertionError, match="released"):
        executor.run(replace(train(it, 0, 8, Direction.BACKWARD), released=(7,)))
    with pytest.raises(AssertionError, match="twice"):
        executor.run(BasePlan(released=(7,)))


KEPT = [(0, 8, Direction.TRAIN_FORWARD, SPAN)]
SCORED = [*KEPT, (0, 3, Direction.LOSS, TAIL), (3, 5, Direction.LOSS, TAIL)]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(2, 2, Direction.TRAIN_FORWARD, SPAN)], "left to right"),
        ([(0, 8, Direction.TRAIN_FORWARD, Span(1, 2))], "layer below"),
        ([(0, 4, Direction.TRAIN_FORWARD, SPAN), (0, 4, Direction.TRAIN_FORWARD, SPAN)], "left to right"),
        ([(0, 8, Direction.BACKWARD, SPAN)], "before all is kept"),
        ([(0, 4, Direction.TRAIN_FORWARD, SPAN), (0, 4, Direction.LOSS, TAIL)], "before all is kept"),
        ([*KEPT, (0, 8, Direction.BACKWARD, SPAN)], "back before all is scored"),
        (
            [*KEPT, (0, 4, Direction.LOSS, TAIL), (4, 4, Direction.BACKWARD, SPAN)],
            "back before all is scored",
        ),
        ([*KEPT, (4, 4, Direction.LOSS, TAIL)], "each row once through the tail"),
        ([*KEPT, *2 * [(0, 4, Direction.LOSS, TAIL)]], "each row once through the tail"),
        ([*KEPT, (0, 8, Direction.LOSS, Span(1, 2))], "tail is on top"),
        ([*SCORED, (0, 4, Direction.BACKWARD, SPAN)], "right to left"),
        ([*SCORED, (0, 8, Direction.BACKWARD, Span(0, 1))], "layer above"),
        ([(0, 0, Direction.TRAIN_FORWARD, SPAN)], "empty"),
    ],
)
def test_windows_out_of_order(steps: list[tuple[int, int, Direction, Span]], message: str) -> None:
    executor, it = ScriptedExecutor(2), batch()
    with pytest.raises(AssertionError, match=message):
        for start, rows, way, span in steps:
            executor.run(train(it, start, rows, way, span))


def test_an_update_needs_all_gradients() -> None:
    executor, it = ScriptedExecutor(2), batch()
    with pytest.raises(AssertionError, match="before all gradients"):
        executor.run(BasePlan(updates=(OptimStep("job"),)))
    executor.run(train(it, 0, 8, Direction.TRAIN_FORWARD))
    with pytest.raises(AssertionError, match="before all gradients"):
        executor.run(BasePlan(updates=(OptimStep("job"),)))
    executor.run(train(it, 0, 8, Direction.LOSS, TAIL))
    executor.run(train(it, 0, 8, Direction.BACKWARD, Span(1, 2)))
    with pytest.raises(AssertionError, match="before all gradients"):
        executor.run(BasePlan(updates=(OptimStep("job"),)))
    executor.run(train(it, 0, 8, Direction.BACKWARD, Span(0, 1)))
    assert executor.run(BasePlan(updates=(OptimStep("job"),))).updated["job"].labels == 8


def test_a_pause_takes_its_time() -> None:
    executor = ScriptedExecutor(2)
    assert executor.run(BasePlan(idle=2.5)).seconds == 0.0
    assert executor.now == 2.5
