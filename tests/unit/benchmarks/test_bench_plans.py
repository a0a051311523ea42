from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coserve.core.plan import BasePlan, BaseResult, OptimStep, StepPlan, StepResult
from coserve.core.request import Request
from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.schedule.segments import announce_batches, inference_segment, training_segment
from coserve_benchmarks.plans import (
    RecordedSegment,
    RecordedStep,
    load_plans,
    record_plans,
    save_plans,
    whole_journeys,
)
from steps import step_plan, step_result

DEPTH = Span(0, 4)


class ScriptedExecutor:
    """Has one plan under way, whose result is there at once."""

    def launch(self, plan: StepPlan) -> None:
        self.launched = plan

    def collect(self, wait: bool = True) -> StepResult | None:
        return step_result(BaseResult(0.001 * len(self.launched.training)))

    def run(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        result = self.collect()
        assert result is not None
        return result


def fake_engine() -> Any:
    loop = SimpleNamespace(executor=ScriptedExecutor())
    return SimpleNamespace(loop=loop, scheduler=SimpleNamespace(under_way=0))


def there_and_back() -> list[BasePlan]:
    batch = MicroBatch(7, "job-1", "mine@0", (5, 3), 4)
    answer = Sequence(1, Request("r", (1, 2, 3)))
    beside = (inference_segment(answer, 0, 3),)
    first = training_segment(batch, 0, 8, Direction.TRAIN_FORWARD, Span(0, 2))
    return [
        BasePlan(inference=beside, training=(first,), micro_batches=announce_batches([batch])),
        BasePlan(inference=beside),
        BasePlan(training=(training_segment(batch, 0, 8, Direction.TRAIN_FORWARD, Span(2, 4)),)),
        BasePlan(training=(training_segment(batch, 4, 4, Direction.BACKWARD, DEPTH),)),
        BasePlan(training=(training_segment(batch, 0, 4, Direction.BACKWARD, DEPTH),)),
        BasePlan(updates=(OptimStep("job-1"),)),
    ]


def recorded() -> list[RecordedStep]:
    engine = fake_engine()
    with record_plans(engine) as steps:
        for plan in there_and_back():
            engine.loop.executor.run(step_plan(plan))
    return steps


def test_steps_that_train_are_recorded() -> None:
    steps = recorded()
    assert [len(step.training) for step in steps] == [1, 1, 1, 1, 0]
    assert steps[0] == RecordedStep(
        3, (RecordedSegment("job-1", 7, (5, 3), 0, 8, Direction.TRAIN_FORWARD, Span(0, 2)),), ()
    )
    assert steps[-1].updates == ("job-1",)


def test_the_runner_answers_as_before_and_is_given_back() -> None:
    engine = fake_engine()
    with record_plans(engine):
        assert engine.loop.executor.run(step_plan(there_and_back()[0])).seconds == 0.001
        assert {"launch", "collect"} <= vars(engine.loop.executor).keys()
    assert not {"launch", "collect"} & vars(engine.loop.executor).keys()


def test_round_trip(tmp_path: Path) -> None:
    steps = recorded()
    save_plans(steps, tmp_path / "plans.json")
    assert load_plans(tmp_path / "plans.json") == steps


def test_only_whole_journeys() -> None:
    steps = recorded()
    assert [s.direction for s in whole_journeys(steps)[7]] == [Direction.TRAIN_FORWARD] * 2 + [
        Direction.BACKWARD
    ] * 2
    assert whole_journeys(steps[1:]) == {}
    assert whole_journeys(steps[:3]) == {}
