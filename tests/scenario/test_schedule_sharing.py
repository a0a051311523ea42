"""Sharing of the machine: several jobs by weight, and time slices of whole mini-batches."""

import pytest

from coserve.core.events import StepDone
from coserve.core.plan import BasePlan
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor

DEPTH = 8


def scheduler(policy: str, **options: object) -> Scheduler:
    config = SchedulerConfig(layers=DEPTH, max_positions=1024, quantum=0.025)
    return Scheduler(BaseCache(config, PagePool(512, 16)), CostModel(), make_policy(policy, **options))


def give(it: Scheduler, job: str, weight: float, rows: int, count: int) -> None:
    batches = [MicroBatch(it.new_key(), job, f"{job}@0", (rows,), DEPTH) for _ in range(count)]
    it.training.add(job, batches, weight)


def keep_training(
    it: Scheduler, executor: ScriptedExecutor, seconds: float, jobs: dict[str, tuple[float, int, int]]
) -> None:
    end = executor.now + seconds
    while executor.now < end:
        for event in executor.step(it):
            if isinstance(event, StepDone):
                give(it, event.job, *jobs[event.job])


def rows_by_job(plans: list[BasePlan]) -> dict[str, float]:
    rows: dict[str, float] = {}
    for plan in plans:
        for segment in plan.training:
            job = segment.job
            rows[job] = rows.get(job, 0.0) + segment.length * len(segment.span) / DEPTH
    return rows


@pytest.mark.parametrize("with_inference", [False, True])
@pytest.mark.parametrize("other", [(512, 2), (64, 3)])
def test_two_jobs_by_weight(with_inference: bool, other: tuple[int, int]) -> None:
    it, executor = scheduler("hybrid"), ScriptedExecutor(16)
    jobs = {"heavy": (2.0, 512, 2), "light": (1.0, *other)}
    for name, job in jobs.items():
        give(it, name, *job)
    if with_inference:
        it.requests.submit(Request("r", (1,) * 20, SamplingParams(max_tokens=900)), 0.0)
    keep_training(it, executor, 20.0, jobs)
    rows = rows_by_job(executor.plans)
    assert rows["heavy"] / rows["light"] == pytest.approx(2.0, rel=0.1)


def test_a_job_that_comes_late_does_not_catch_up() -> None:
    it, executor = scheduler("hybrid"), ScriptedExecutor(16)
    jobs = {"old": (1.0, 512, 2), "new": (1.0, 512, 2)}
    give(it, "old", *jobs["old"])
    keep_training(it, executor, 10.0, jobs)
    begun = len(executor.plans)
    give(it, "new", *jobs["new"])
    keep_training(it, executor, 10.0, jobs)
    rows = rows_by_job(executor.plans[begun:])
    assert rows["new"] / rows["old"] == pytest.approx(1.0, rel=0.1)


def test_jobs_may_share_a_step_in_both_directions() -> None:
    it, executor = scheduler("hybrid"), ScriptedExecutor(16)
    jobs = {"a": (3.0, 64, 2), "b": (1.0, 32, 1)}  # of different weights, so that they do not go in step
    for name, job in jobs.items():
        give(it, name, *job)
    keep_training(it, executor, 3.0, jobs)
    ways = [[segment.direction for segment in plan.training] for plan in executor.plans]
    assert any({Direction.TRAIN_FORWARD, Direction.BACKWARD} <= set(one) for one in ways)
    assert any(len({segment.job for segment in plan.training}) == 2 for plan in executor.plans)


def test_time_slices_are_whole_mini_batches_alone() -> None:
    it, executor = scheduler("temporal", n=3, grain="batch"), ScriptedExecutor(16)
    jobs = {"a": (1.0, 700, 2), "b": (1.0, 300, 1)}
    for name, job in jobs.items():
        give(it, name, *job)
    for n in range(24):
        it.requests.submit(Request(str(n), (1,) * 20, SamplingParams(max_tokens=5 + n)), 0.0)
    for _ in range(400):
        for event in executor.step(it):
            if isinstance(event, StepDone):
                give(it, event.job, *jobs[event.job])
        if not it.requests.running and not it.requests.waiting:
            break
    plans = [plan for plan in executor.plans if plan.inference or plan.training or plan.updates]
    assert it.stats.fused_steps == 0 and it.stats.finished == 24
    slices = [n for n, plan in enumerate(plans) if plan.training or plan.updates]
    assert len(slices) >= 4 * 6
    assert not any(plans[n].inference for n in slices)
    ways = (Direction.TRAIN_FORWARD, Direction.LOSS, Direction.BACKWARD)
    trained = []
    for first in slices[::4]:
        *passes, update = plans[first : first + 4]
        (name,) = (step.job for step in update.updates)
        assert not update.training and not any(plan.updates for plan in passes)
        trained.append(name)
        batches = [segment.key for segment in passes[0].training]
        assert len(batches) == jobs[name][2]
        for plan, way in zip(passes, ways, strict=True):
            assert [segment.key for segment in plan.training] == batches
            for segment in plan.training:
                assert segment.job == name
                assert segment.direction is way and segment.length == jobs[name][1]
                assert way is Direction.LOSS or len(segment.span) == DEPTH
    assert {*trained} == {"a", "b"}
    assert slices == [n for first in slices[::4] for n in range(first, first + 4)]


def test_time_slices_follow_the_count_of_finished_requests() -> None:
    it, executor = scheduler("temporal", n=4, grain="batch"), ScriptedExecutor(16)
    give(it, "a", 1.0, 100, 1)
    for n in range(12):
        it.requests.submit(Request(str(n), (1,) * 20, SamplingParams(max_tokens=5 * (n + 1))), 0.0)
    finished_at_slice = []
    while it.requests.running or it.requests.waiting:
        before = it.stats.finished
        for event in executor.step(it):
            if isinstance(event, StepDone):
                give(it, "a", 1.0, 100, 1)
        if any(segment.direction is Direction.TRAIN_FORWARD for segment in executor.plans[-1].training):
            finished_at_slice.append(before)
    assert finished_at_slice == [4, 8]


def test_time_slices_fill_the_gaps_when_nobody_is_there() -> None:
    it, executor = scheduler("temporal", n=1000), ScriptedExecutor(16)
    give(it, "a", 1.0, 100, 3)
    while it.has_work:
        executor.step(it)
    assert executor.trained == {"a": 300}
