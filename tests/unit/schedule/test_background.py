"""Requests in the background: below everything else, and to their end."""

import random
from dataclasses import replace

import pytest

from coserve.core.request import Request, SamplingParams
from coserve.memory.pages import PagePool
from coserve.schedule.background import SLOWER
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor
from steps import step_result

PAGE, STEP, TURNS, BATCH = 4, 0.002, 120, 12
Heard = dict[str, list[int]]  # by request: the steps of its tokens


def play(seed: int, row: float, pages: int, batch: int) -> tuple[Heard, int]:
    """Live requests beside `batch` others; a row takes `row` seconds. Returns how many rows of the batch
    passed beside theirs, too."""
    draw, heard, beside = random.Random(seed), Heard(), 0
    config = SchedulerConfig(layers=4, max_positions=256, max_running=8)
    weights = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": row}
    scheduler = Scheduler(BaseCache(config, PagePool(pages, PAGE)), CostModel(weights), make_policy("hybrid"))
    executor = ScriptedExecutor(PAGE)

    def submit(name: str, draw: random.Random, now: float, background: bool = False) -> None:
        sampling = SamplingParams(max_tokens=draw.randint(2, 30), seed=1, ignore_eos=True)
        prompt = tuple(draw.randrange(1, 90) for _ in range(draw.randint(1, 60)))
        request = Request(name, prompt, sampling, arrival=now, background=background)
        scheduler.requests.submit(request, now)
        heard[name] = []

    for i in range(batch):
        submit(f"batch-{i}", random.Random(i), 0.0, background=True)
    for turn in range(4000):
        now = turn * STEP
        if turn < TURNS and draw.random() < 0.08:
            submit(f"live-{turn}", draw, now)
        known = dict(scheduler.requests.sequences)
        plan = scheduler.plan(now).only
        rows = {segment.key: segment.length for segment in plan.inference}
        own = [key for key in rows if known[key].request.background]
        if len(known) > sum(one.request.background for one in known.values()):
            assert all(rows[key] == 1 for key in own)
            decoding = [one for one in plan.inference if one.length == 1]
            others = tuple(one for one in decoding if one.key not in own)
            most = SLOWER * scheduler.cost.first.predict(replace(plan, inference=others)) + 1e-9
            assert not own or (
                others and scheduler.cost.first.predict(replace(plan, inference=tuple(decoding))) <= most
            )
            beside += len(own)
        for events in scheduler.apply(step_result(executor.run(plan)), now).values():
            for event in events:
                heard[event.request_id].append(turn)
        if turn >= TURNS and not scheduler.requests.has_work:
            break
    assert not scheduler.requests.sequences
    return heard, beside


@pytest.mark.parametrize("row", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("pages", [48, 400])
def test_others_wait_for_none_of_them(row: float, pages: int) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    heard, beside = play(seed, row, pages, BATCH)
    alone, _ = play(seed, row, pages, 0)
    assert all(heard[f"batch-{i}"] for i in range(BATCH))
    assert len(heard) == len(alone) + BATCH and alone
    assert {name: heard[name] for name in alone} == alone
    assert not beside or row < 1e-3


def test_rows_that_cost_nothing_ride_along() -> None:
    assert play(7, 0.0, 400, BATCH)[1] > 0
