"""Windows pass alone for a while after memory ran out for several together, and then share passes again."""

import itertools

import pytest

from bases import LAYERS, SMALL, WIDE, TwoBases, request
from coserve.core.plan import BasePlan, PassesAlone
from coserve.core.request import BASE, Request, SamplingParams
from coserve.core.sequence import MicroBatch
from coserve.memory.pages import PagePool
from coserve.schedule import scheduler as module
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor

LONG = 10**4  # tokens


def add_jobs(schedule: Scheduler, names: list[str], base: str = BASE, layers: int = 4) -> None:
    for name in names:
        batches = [MicroBatch(schedule.new_key(), name, f"{name}@0", (64,), layers) for _ in range(200)]
        schedule.training.add(name, batches, base=base)


@pytest.mark.parametrize("answers", [0, 2])
def test_windows_share_passes_again_after_a_while(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that train have one window each, apart from answers, and all jobs get their turns."""
    monkeypatch.setattr(module, "_ALONE", 9)
    config = SchedulerConfig(4, LONG)
    schedule = Scheduler(BaseCache(config, PagePool(64, 16)), CostModel(), make_policy("hybrid"))
    executor = ScriptedExecutor(16)
    add_jobs(schedule, ["a", "b", "c"])
    for _ in range(answers):
        sampling = SamplingParams(max_tokens=400)
        schedule.requests.submit(Request("r", (1, 2, 3), sampling), 0.0)
    executor.is_short = lambda plan: not any(result.together_failed for result in executor.results)
    while executor.is_short(BasePlan()):
        executor.step(schedule)
    assert executor.results[-1].paused and not executor.results[-1].trained
    began = len(executor.plans)
    while len([plan for plan in executor.plans[began:] if plan.training]) < 15:
        executor.step(schedule)
    trains = [plan for plan in executor.plans[began:] if plan.training]
    assert [plan.alone for plan in trains] == [PassesAlone.WINDOWS] * 9 + [PassesAlone.NOBODY] * 6
    assert all(len(plan.training) == 1 and not plan.fused for plan in trains[:9])
    assert {plan.training[0].job for plan in trains[:9]} == {"a", "b", "c"}
    assert any(len(plan.training) > 1 or plan.fused for plan in trains[9:])
    assert not any(plan.alone for plan in executor.plans if not plan.training)


def test_the_windows_of_another_base_go_on_together() -> None:
    world = TwoBases()
    for base in (SMALL, WIDE):
        add_jobs(world.it, [f"{base} {number}" for number in range(3)], base, LAYERS[base])
    world.submit(request(SMALL, answer=50))
    world.executors[WIDE].is_short = lambda plan: True
    for _ in itertools.takewhile(lambda _: not world.it._alone[WIDE], range(50)):
        world.step()
    began = len(world.plans)
    for _ in range(40):
        world.step()
    of_each = {
        base: [plan.bases[base] for plan in world.plans[began:] if base in plan.bases] for base in LAYERS
    }
    assert all(part.alone is PassesAlone.WINDOWS for part in of_each[WIDE] if part.training)
    assert max(len(part.training) for part in of_each[WIDE]) == 1
    assert not any(part.alone for part in of_each[SMALL])
    assert max(len(part.training) for part in of_each[SMALL]) > 1
