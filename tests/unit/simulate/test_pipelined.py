"""The pipelined executor: timelines of stages, and the scheduler's plans that share a pipeline out."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest

from coserve.core.events import StepDone, TokenEvent
from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import SLO, Request
from coserve.core.sequence import MicroBatch
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.overlap import Overlap
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.simulate.pipelined import Pipeline, PipelinedExecutor, StageSeconds
from coserve.simulate.simulated import SimulatedExecutor
from coserve.simulate.virtual_clock import VirtualClock
from coserve.workload.requests import greedy

LAYERS = 8
COST = CostModel()


def split(seconds: float, stages: int) -> StageSeconds:
    """A plan's seconds in equal parts, all on its way forward."""
    return StageSeconds((seconds / stages,) * stages, (0.0,) * stages)


def evenly(stages: int) -> PipelinedExecutor:
    """Stages that each take an equal part of what is predicted."""
    return PipelinedExecutor(stages, lambda plan: split(COST.predict(plan), stages))


def scheduler(stages: int, policy: str = "hybrid") -> Scheduler:
    config = SchedulerConfig(LAYERS, 4096, overlap=Overlap(stages, stages), slowdown=None)
    return Scheduler(BaseCache(config, PagePool(4096, 16)), CostModel(), make_policy(policy))


def ask(made: Scheduler, count: int, tokens: int = 12, slo: SLO = SLO()) -> None:
    for number in range(count):
        made.requests.submit(Request(str(number), (0,) * 8, greedy(tokens), None, slo), 0.0)


def answer(made: Scheduler, executor: VirtualClock) -> dict[int, list[float]]:
    """Times of all tokens by sequence."""
    found: dict[int, list[float]] = {}
    while made.has_work:
        for event in executor.step(made):
            if isinstance(event, TokenEvent):
                found.setdefault(event.key, []).append(executor.now)
    return found


# Timelines


def play(stages: int, plans: Iterable[tuple[float, StageSeconds]]) -> list[tuple[float, float, float]]:
    """(begin, when it has gone forward, end) of plans that enter at some times."""
    pipeline = Pipeline(stages)
    entered = [pipeline.enter(at, taken) for at, taken in plans]
    pipeline.until(lambda: all(one.ended is not None for one in entered))
    return [(one.begun, one.there or 0.0, one.ended or 0.0) for one in entered]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_plans_follow_each_other_a_stage_apart(stages: int) -> None:
    found = play(stages, [(0.0, StageSeconds((2.0,) * stages, (0.0,) * stages))] * 5)
    assert found == [(2.0 * n, 2.0 * (stages + n), 2.0 * (stages + n)) for n in range(5)]


def test_what_goes_forward_is_before_what_goes_back() -> None:
    first, second = StageSeconds((1.0, 1.0), (3.0, 3.0)), split(2.0, 2)
    assert play(2, [(0.0, first)]) == [(0.0, 2.0, 8.0)]
    # The second plan waits for what the last stage does when it comes there, but not in the first one.
    assert play(2, [(0.0, first), (0.0, second)]) == [(0.0, 2.0, 9.0), (1.0, 3.0, 3.0)]
    assert play(2, [(0.0, first), (1.5, second)]) == [(0.0, 2.0, 8.0), (1.5, 6.0, 6.0)]
    assert play(2, [(0.0, first), (4.5, second)]) == [(0.0, 2.0, 8.5), (4.5, 6.5, 6.5)]


def test_what_is_sent_takes_time_between_stages() -> None:
    taken = StageSeconds((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 0.25, 0.5)
    assert play(3, [(10.0, taken)]) == [(10.0, 13.5, 17.5)] and taken.total == 7.5
    assert taken.times(2.0).total == 15.0


def test_stages_do_one_thing_at_a_time_and_keep_the_order() -> None:
    """Random plans: as late as their own work and that before them in a stage, and all in order."""
    draw = random.Random(3)
    for _ in range(50):
        stages = draw.randrange(1, 5)
        plans = []
        for number in range(12):
            back = draw.random() < 0.5
            there = tuple(draw.random() for _ in range(stages))
            again = tuple(draw.random() if back else 0.0 for _ in range(stages))
            plans.append((0.3 * number, StageSeconds(there, again)))
        found = play(stages, plans)
        for (at, taken), (begun, gone, ended) in zip(plans, found, strict=True):
            assert begun >= at and gone >= begun + taken.there - 1e-9 and ended >= gone + taken.again - 1e-9
        for place in (0, 1):
            assert sorted(one[place] for one in found) == [one[place] for one in found]
        ends = [one[2] for (_, taken), one in zip(plans, found, strict=True) if any(taken.back)]
        assert ends == sorted(ends)
        for stage in range(stages):
            work = sum(taken.forward[stage] + taken.back[stage] for _, taken in plans)
            assert max(one[2] for one in found) >= work - 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_stages_serve_what_goes_forward_first_in_the_order_of_the_plans(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        stages, plans, at = draw.randint(1, 4), list[tuple[float, StageSeconds]](), 0.0
        for _ in range(8):
            at += draw.random()
            there, again = (tuple(draw.uniform(0.2, 1.0) for _ in range(stages)) for _ in range(2))
            back = again if draw.random() < 0.7 else (0.0,) * stages
            plans.append((at, StageSeconds(there, back, draw.random(), draw.random())))
        assert play(stages, plans) == walk(stages, plans)


def walk(stages: int, plans: list[tuple[float, StageSeconds]]) -> list[tuple[float, float, float]]:
    """The reference for `play`: whenever something changes, each idle stage begins with the first plan that
    has not passed it on its way forward, if that is there, or else with the first one on its way back."""
    there = [(False, stage) for stage in range(stages)]
    ways = [there + [(True, one) for _, one in there[::-1] if any(taken.back)] for _, taken in plans]
    done, ready = [0 for _ in plans], [at for at, _ in plans]  # steps that are over, and when the next may be
    over: list[float | None] = [None for _ in plans]  # when the step under way is over
    found, now = [(-1.0, -1.0, -1.0) for _ in plans], -1.0
    while left := [n for n in range(len(plans)) if done[n] < len(ways[n])]:
        times = [ready[n] if (end := over[n]) is None else end for n in left]
        now = min(time for time in times if time > now)
        for n in left:
            if over[n] == now:
                (is_back, stage), taken = ways[n][done[n]], plans[n][1]
                is_last = stage == (0 if is_back else stages - 1)
                ready[n] = now + (0.0 if is_last else taken.returning if is_back else taken.sending)
                found[n] = found[n][0], found[n][1] if is_back else now, now
                done[n], over[n] = done[n] + 1, None
        for step in sorted((is_back, stage) for is_back in (False, True) for stage in range(stages)):
            at_work = any(over[n] is not None and ways[n][done[n]][1] == step[1] for n in left)
            first = next((n for n in left if step in ways[n][done[n] :]), None)
            if at_work or first is None or ways[first][done[first]] != step or ready[first] > now:
                continue
            taken = plans[first][1]
            over[first] = now + (taken.back if step[0] else taken.forward)[step[1]]
            found[first] = found[first] if done[first] else (now, now, now)
    return found


# With the scheduler


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_answers_a_plan_for_each_stage_at_once(stages: int) -> None:
    """A token's row passes all stages before the next one; others' rows pass meanwhile."""
    alone, piped = scheduler(1), scheduler(stages)
    ask(alone, stages)
    ask(piped, stages)
    one = SimulatedExecutor(lambda plan: 1.0)
    many = PipelinedExecutor(stages, lambda plan: split(1.0, stages))
    slow, quick = answer(alone, one), answer(piped, many)
    for times in quick.values():
        gaps = [after - before for before, after in pairwise(times[1:])]  # all prompts were in one plan
        assert gaps == pytest.approx([1.0] * len(gaps))
    assert len(quick) == len(slow) == stages
    assert len({times[1] for times in quick.values()}) == stages  # they are not in the same plans
    # One batch of all rows takes as long as parts of it, as a plan's seconds do not depend on its rows.
    assert many.now == pytest.approx(one.now + (stages - 1) / stages, abs=1.0)


def test_no_row_is_planned_before_the_token_that_it_needs() -> None:
    made, under_way = scheduler(3), dict[int, int]()
    ask(made, 7)

    def seconds(plan: BasePlan) -> StageSeconds:
        for segment in plan.inference:
            assert under_way.get(segment.key, 0) == 0 or segment.start + segment.length <= 8
            under_way[segment.key] = 1
        decoded = sum(segment.length == 1 for segment in plan.inference)
        assert decoded <= 3  # of seven, in three plans
        return split(0.3, 3)

    def observe(plan: BasePlan, result: BaseResult, began: float) -> None:
        for segment in plan.inference:
            under_way[segment.key] = 0

    found = answer(made, PipelinedExecutor(3, seconds, observe=observe))
    assert [len(times) for times in found.values()] == [12] * 7


@pytest.mark.parametrize("policy", ["hybrid", "adaptive", "temporal:3,grain=batch", "idle-only", "deferred"])
def test_jobs_train_in_full_depth_windows(policy: str) -> None:
    """All policies finish answers and optimizer steps, in windows through all layers."""
    made, left = scheduler(2, policy), 4

    def seconds(plan: BasePlan) -> StageSeconds:
        assert all(len(one.span) in (1, LAYERS) for one in plan.training)
        return split(COST.predict(plan), 2)

    executor = PipelinedExecutor(2, seconds)
    ask(made, 6, slo=SLO(end_to_end=5.0))
    while left or made.has_work:
        if left and not made.training.has_work:
            made.training.add("job", [MicroBatch(made.new_key(), "job", "job@0", (300, 212), LAYERS)])
        left -= sum(isinstance(event, StepDone) for event in executor.step(made))
    assert made.stats.updates == 4 and made.stats.finished == 6


def test_training_keeps_bounds_between_tokens() -> None:
    """Training in all plans under way together leaves answers their bound, and fills most of it. What plans
    wait for each other in the stages is not foreseen: one gap in twenty may be up to a tenth longer."""
    bound, made = 0.12, scheduler(4)
    ask(made, 8, tokens=200, slo=SLO(between_tokens=bound))
    batches = [MicroBatch(made.new_key(), "job", "job@0", (4096,), LAYERS) for _ in range(60)]
    made.training.add("job", batches)
    executor = evenly(4)
    found: dict[int, list[float]] = {}
    while made.stats.finished < 8:
        for event in executor.step(made):
            if isinstance(event, TokenEvent):
                found.setdefault(event.key, []).append(executor.now)
    gaps = [after - before for times in found.values() for before, after in pairwise(times[1:])]
    assert sorted(gaps)[int(0.95 * len(gaps))] <= bound and max(gaps) <= 1.1 * bound
    assert sum(gaps) / len(gaps) > 0.4 * bound
    assert made.stats.kept_rows > 0


def test_delays_are_counted_once_for_all_stages() -> None:
    """The deferral counted for an answer is the delay of its tokens against a run without training, with two
    stages as with four."""
    ends, delays = {}, {}
    for stages in (0, 2, 4):
        made = scheduler(stages or 2)
        sequences = [
            made.requests.submit(Request(str(n), (0,) * 8, greedy(100), None, SLO(between_tokens=0.2)), 0.0)
            for n in range(8)
        ]
        if stages:
            batches = [MicroBatch(made.new_key(), "job", "job@0", (4096,), LAYERS) for _ in range(60)]
            made.training.add("job", batches)
        executor = evenly(stages or 2)
        while made.stats.finished < 8:
            executor.step(made)
        ends[stages], delays[stages] = executor.now, sum(one.deferred for one in sequences) / 8
    for stages in (2, 4):
        later = ends[stages] - ends[0]
        assert later > 0.5 and later / 3 < delays[stages] < 1.5 * later
