"""Plans of steps, whose parts run on the executors of several bases, and the results of both."""

import pytest

from bases import SMALL, WIDE, scripted
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, StepPlan
from coserve.core.request import Request, SamplingParams
from coserve.errors import WeightsUnreadable
from coserve.executors.step_executor import StepExecutor
from scripted_executor import ScriptedExecutor


def answers(*keys: int) -> BasePlan:
    """A plan of new sequences."""
    request = Request("r", (5, 6, 7), SamplingParams(seed=1))
    segments = (InferenceSegment(key, 0, 3, 0, 1, new_pages=(key,), request=request) for key in keys)
    return BasePlan(inference=tuple(segments))


def test_each_base_s_part_runs_on_its_executor() -> None:
    executor, parts = scripted()
    result = executor.run(StepPlan({SMALL: answers(1), WIDE: answers(2, 3)}))
    assert {base: sorted(its.sampled) for base, its in result.bases.items()} == {SMALL: [1], WIDE: [2, 3]}
    ran = [[one.key for one in plan.inference] for part in parts.values() for plan in part.plans]
    assert ran == [[1], [2, 3]]
    assert result.bases == {base: part.results[0] for base, part in parts.items()}
    assert result.seconds == sum(part.results[0].seconds for part in parts.values())
    executor.run(StepPlan({WIDE: BasePlan(released=(2,))}))
    assert [len(part.plans) for part in parts.values()] == [1, 2], "nothing for the other"


def test_of_all_bases_those_with_work_are_in_a_step() -> None:
    empty, full = BasePlan(idle=0.25), answers(1)
    assert StepPlan.of({SMALL: empty, WIDE: full}).bases == {WIDE: full}
    assert [*StepPlan.of({SMALL: full, WIDE: full}).bases] == [SMALL, WIDE], "in the order of the bases"
    assert StepPlan.of({SMALL: empty, WIDE: empty}).bases == {SMALL: empty}, "which rests so long"
    assert StepPlan.of({SMALL: empty, WIDE: empty}).is_empty


class Away(ScriptedExecutor):
    """Cannot read its weights at first."""

    tries = 0

    def collect(self, wait: bool = True) -> BaseResult | None:
        self.tries += 1
        if self.tries < 3:
            raise WeightsUnreadable("the disk is away")
        return super().collect(wait)


@pytest.mark.parametrize("away", [SMALL, WIDE])
def test_a_part_that_cannot_run_is_tried_again_alone(away: str) -> None:
    executor, parts = scripted(**{away: Away})
    executor.launch(StepPlan({SMALL: answers(1), WIDE: answers(2)}))
    for _ in range(2):
        with pytest.raises(WeightsUnreadable):
            executor.collect()
        assert parts[WIDE]._launched, "commands come behind all parts"
    result = executor.collect()
    assert result is not None and [sorted(its.sampled) for its in result.bases.values()] == [[1], [2]]
    assert [len(part.plans) for part in parts.values()] == [1, 1], "each part ran once"
    assert executor.collect() is None


def test_results_come_in_the_order_of_launches() -> None:
    executor, parts = scripted()
    executor.launch(StepPlan({WIDE: answers(1)}))
    executor.launch(StepPlan({SMALL: answers(2)}))
    assert not any(part._launched for part in parts.values()), "the bases run in turn"
    first, second = executor.collect(), executor.collect()
    assert first is not None and second is not None
    assert [[*result.bases] for result in (first, second)] == [[WIDE], [SMALL]]
    assert executor.collect(wait=False) is None


def test_plans_of_one_base_alone_are_under_way_together() -> None:
    one = ScriptedExecutor(4)
    executor = StepExecutor(one)
    for key in (1, 2, 3):
        executor.launch(StepPlan({SMALL: answers(key)}))
    assert len(one._launched) == 3
    ran = [executor.collect(wait) for wait in (True, True, True, False)]
    assert [None if each is None else [*each.only.sampled] for each in ran] == [[1], [2], [3], None]


class Paused(ScriptedExecutor):
    """Says of each plan that its training was stopped."""

    def collect(self, wait: bool = True) -> BaseResult | None:
        return BaseResult(2.0, paused=True)


def test_pauses_reach_all_and_one_pause_pauses_the_step() -> None:
    executor, parts = scripted(**{WIDE: Paused})
    executor.pause_training()
    assert all(part._pausing for part in parts.values())
    executor.resume_training()
    assert not any(part._pausing for part in parts.values())
    result = executor.run(StepPlan({SMALL: answers(1), WIDE: BasePlan()}))
    small = result.bases[SMALL]
    assert not small.paused and result.paused
    assert result.seconds == small.seconds + 2.0
