"""Long prompts whose keys and values are elsewhere take turns with everybody else's answers."""

from dataclasses import replace

import pytest

from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, OffloadReads
from coserve.core.request import Request, SamplingParams
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.offloading import Offloading
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swapping import Swapping
from scripted_executor import ScriptedExecutor

PAGE, READ = 4, 1e-3  # seconds to read one offloaded token


class Slow(ScriptedExecutor):
    """Waits `READ` seconds for each offloaded token that a step reads."""

    def collect(self, wait: bool = True) -> BaseResult | None:
        result = super().collect(wait)
        if result is None:
            return None
        tokens = sum(segment.context for segment in long_rows(self.plans[-1]))
        self.now += tokens * READ
        reads = OffloadReads(tokens, tokens * READ)
        return replace(result, seconds=result.seconds + reads.seconds, offload_reads=reads)


def long_rows(plan: BasePlan) -> list[InferenceSegment]:
    return [segment for segment in plan.inference if segment.offloaded]


class World:
    """Ten pages here, and a thousand elsewhere."""

    def __init__(self) -> None:
        swapping = Swapping(CostModel(), 1000)
        self.pool, config = PagePool(10, PAGE), SchedulerConfig(2, 1000, prefix_sharing=False)
        policy = make_policy("hybrid")
        offloading = Offloading(swapping.tier, 11, 1000, PAGE)
        self.it = Scheduler(BaseCache(config, self.pool, swapping, offloading), CostModel(), policy)
        self.executor = Slow(PAGE, swap_pages=1000)

    def ask(self, prompt: int, answer: int) -> Sequence:
        request = Request(
            "r", tuple(range(prompt)), SamplingParams(max_tokens=answer), arrival=self.executor.now
        )
        return self.it.requests.submit(request, self.executor.now)

    def until_ended(self, sequence: Sequence) -> None:
        while sequence.finish_reason is None:
            self.executor.step(self.it)


@pytest.mark.parametrize("count", [1, 4])
def test_long_prompts_take_at_most_half_of_the_time_however_many(count: int) -> None:
    world = World()
    long = [world.ask(100, 400) for _ in range(count)]
    while any(len(one.output) < 2 for one in long):
        world.executor.step(world.it)
    before, planned = [len(one.output) for one in long], len(world.executor.plans)
    short, began = world.ask(4, 30), world.executor.now
    world.until_ended(short)
    plans = world.executor.plans[planned:]
    assert max(len(long_rows(plan)) for plan in plans) == 1
    read = sum(segment.context for plan in plans for segment in long_rows(plan)) * READ
    passed = world.executor.now - began
    most = max(sequence.length for sequence in long) * READ  # of the step under way at the end
    assert read <= passed / 2 + most
    gained = [len(one.output) - had for one, had in zip(long, before, strict=True)]
    assert max(gained) - min(gained) <= 1  # they take turns


def test_alone_they_do_not_rest() -> None:
    world = World()
    long = [world.ask(100, 20) for _ in range(3)]
    for sequence in long:
        world.until_ended(sequence)
    decodes = [plan for plan in world.executor.plans if all(s.length == 1 for s in plan.inference)]
    assert any(len(long_rows(plan)) == 3 for plan in decodes)
    assert all(long_rows(plan) for plan in world.executor.plans if plan.inference)


def test_everybody_ends() -> None:
    world = World()
    asked = [world.ask(prompt, 25) for prompt in (5, 100, 7, 90, 3, 120, 9)]
    for sequence in asked:
        world.until_ended(sequence)
    assert [len(one.output) for one in asked] == [25] * len(asked)
    assert world.it.caches.first.offloading.used == 0
