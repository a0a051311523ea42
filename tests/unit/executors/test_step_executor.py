"""Plans of several bases, split between their executors, and their results together."""

from dataclasses import replace

import pytest

from bases import SMALL, WIDE, scripted
from coserve.core.plan import (
    BasePlan,
    BaseResult,
    InferenceSegment,
    OptimStep,
    SequenceStart,
    SwapIn,
    SwapOut,
)
from coserve.core.request import SamplingParams
from coserve.errors import OffloadFailed, WeightsUnreadable
from coserve.executors.scripted import ScriptedExecutor


def start(key: int, base: str) -> tuple[SequenceStart, InferenceSegment]:
    segment = InferenceSegment(key, 0, 3, 0, 1, new_pages=(key,), base=base)
    return SequenceStart(key, (5, 6, 7), (), SamplingParams(seed=1), base=base), segment


def plan_of(*starts: tuple[SequenceStart, InferenceSegment]) -> BasePlan:
    sequences, segments = zip(*starts, strict=True)
    return BasePlan(inference=segments, sequences=sequences)


def test_each_executor_gets_its_part_and_keys() -> None:
    executor, parts = scripted()
    result = executor.run(plan_of(start(1, SMALL), start(2, WIDE), start(3, WIDE)))
    assert sorted(result.sampled) == [1, 2, 3]
    ran = [[one.key for one in plan.inference] for part in parts.values() for plan in part.plans]
    assert ran == [[1], [2, 3]]
    times = {base: part.results[0].seconds for base, part in parts.items()}
    assert result.seconds == sum(times.values())
    assert result.beside == {WIDE: parts[WIDE].results[0]}
    executor.run(BasePlan(released=(3, 1)))
    assert (parts[SMALL].plans[-1].released, parts[WIDE].plans[-1].released) == ((1,), (3,))
    executor.run(BasePlan(released=(2,)))
    assert len(parts[SMALL].plans) == 2 and parts[WIDE].plans[-1].released == (2,), "nothing for the other"


def test_what_has_no_rows_goes_to_its_base() -> None:
    executor, parts = scripted()
    executor.run(BasePlan(idle=0.25))
    assert parts[SMALL].plans[-1].idle == 0.25 and not parts[WIDE].plans
    outs = SwapOut(1, (0,)), SwapOut(2, (0,), WIDE), SwapOut(3, (1,), WIDE)
    plan = BasePlan(updates=(OptimStep("j", base=WIDE), OptimStep("k")), swap_out=outs)
    small, wide = executor._part(plan, SMALL), executor._part(plan, WIDE)
    assert [[update.job for update in part.updates] for part in (small, wide)] == [["k"], ["j"]]
    assert [[out.copy for out in part.swap_out] for part in (small, wide)] == [[1], [2, 3]]
    executor._split(plan)
    later = executor._split(BasePlan(swap_dropped=(3, 1), swap_in=(SwapIn(2, (5,), base=WIDE),)))
    assert (later[SMALL].swap_dropped, later[SMALL].swap_in) == ((1,), ())
    assert (later[WIDE].swap_dropped, [back.copy for back in later[WIDE].swap_in]) == ((3,), [2])


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
    executor.launch(plan_of(start(1, SMALL), start(2, WIDE)))
    for _ in range(2):
        with pytest.raises(WeightsUnreadable):
            executor.collect()
        assert parts[WIDE]._launched, "commands come behind all parts"
    result = executor.collect()
    assert result is not None and sorted(result.sampled) == [1, 2]
    assert [len(part.plans) for part in parts.values()] == [1, 1], "each part ran once"
    assert executor.collect() is None


def test_results_come_in_the_order_of_launches() -> None:
    executor, _ = scripted()
    executor.launch(plan_of(start(1, WIDE)))
    executor.launch(plan_of(start(2, SMALL)))
    first, second = executor.collect(), executor.collect()
    assert first is not None and second is not None
    assert (sorted(first.sampled), sorted(second.sampled)) == ([1], [2]) and not second.beside
    assert executor.collect(wait=False) is None


def test_pauses_reach_all_and_one_pause_pauses_the_step() -> None:
    executor, parts = scripted()
    executor.pause_training()
    assert all(part._pausing for part in parts.values())
    executor.resume_training()
    assert not any(part._pausing for part in parts.values())
    executor._launched.append({SMALL: BasePlan(), WIDE: BasePlan()})
    wide = BaseResult(
        2.0, paused=True, swap_failed=(2,), swap_seconds=(0.25, 0.5), lost={4: OffloadFailed("")}
    )
    executor._done = {SMALL: BaseResult(1.0, swap_failed=(1,), swap_seconds=(0.25, 0.0)), WIDE: wide}
    result = executor.collect()
    assert result is not None and result.paused and result.seconds == 3.0
    assert (result.swap_failed, result.swap_seconds, [*result.lost]) == ((1, 2), (0.5, 0.5), [4])


def test_a_preempted_sequence_may_be_named_again_in_the_plan_that_releases_it() -> None:
    executor, parts = scripted()
    first = plan_of(start(1, SMALL), start(2, WIDE))
    executor.run(first)
    executor.run(replace(plan_of(start(2, WIDE)), released=(2,)))
    executor.run(BasePlan(released=(1, 2)))
    released = {base: [plan.released for plan in part.plans] for base, part in parts.items()}
    assert released == {SMALL: [(), (1,)], WIDE: [(), (2,), (2,)]}
