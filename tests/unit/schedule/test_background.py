"""Requests in the background: below everything else, and to their end."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from coserve.core.request import SLO, Request, SamplingParams
from coserve.memory.pages import PagePool
from coserve.schedule.background import PATIENCE, SHARE, SLOWER
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


def turns_of(seed: int, row: float, bound: float | None) -> tuple[list[tuple[float, int]], float]:
    """A batch beside live requests of which one is always open. Returns the steps whose background rows
    passed by turn (when, and how many), and the seconds that the batch took.

    Each step is compared with a reference that knows the whole history: a turn has one background sequence,
    with one decode row or at most the least chunk of a prompt, and comes no earlier than all turns before it
    and the rest that goes before the first allow.
    """
    draw = random.Random(seed)
    config = SchedulerConfig(layers=4, max_positions=256, max_running=8)
    weights = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": row}
    cost = CostModel(weights)
    scheduler = Scheduler(BaseCache(config, PagePool(400, PAGE)), cost, make_policy("hybrid"))
    executor, now, count = ScriptedExecutor(PAGE), 0.0, 0
    turns, spent, rest_began = list[tuple[float, int]](), list[tuple[float, float]](), None

    def submit(name: str, tokens: int, background: bool) -> None:
        sampling = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
        prompt = tuple(draw.randrange(1, 90) for _ in range(draw.randint(1, 60)))
        slo = SLO(between_tokens=None if background else bound)
        scheduler.requests.submit(
            Request(name, prompt, sampling, slo=slo, arrival=now, background=background), now
        )

    for i in range(2):
        submit(f"batch-{i}", 2, True)
    while any(one.request.background for one in scheduler.requests.sequences.values()):
        while sum(not one.request.background for one in scheduler.requests.sequences.values()) < 2:
            submit(f"live-{(count := count + 1)}", draw.randint(2, 20), False)
        known = dict(scheduler.requests.sequences)
        plan = scheduler.plan(now).only
        segments = {one.key: one for one in plan.inference}
        own = {key: one for key, one in segments.items() if known[key].request.background}
        others = tuple(one for key, one in segments.items() if key not in own)
        decoding = tuple(one for one in others if one.length == 1)
        free = SLOWER * cost.predict(replace(plan, inference=decoding)) + 1e-12
        riders = tuple(one for one in own.values() if one.length == 1)
        if (own and cost.predict(replace(plan, inference=(*decoding, *riders))) > free) or any(
            one.length > 1 for one in own.values()
        ):  # more than rides along
            (took,) = [one for one in own.values() if one.length > 1 or len(own) == 1]
            assert took.length <= config.min_prefill_rows
            assert rest_began is not None and now >= rest_began + PATIENCE
            assert all(now >= at + seconds / SHARE - 1e-9 for at, seconds in spent)
            added = cost.predict(plan) - cost.predict(replace(plan, inference=others))
            spent.append((now, added))
            turns.append((now, took.length))
            newest = [one.newest_at for key, one in known.items() if key in segments and key not in own]
            due = min((at + (bound or 1e9) - now for at in newest if at is not None), default=1e9)
            assert cost.predict(plan) <= due or cost.predict(replace(plan, inference=others)) > due
        rest_began = now if rest_began is None else rest_began
        seconds = cost.predict(plan)
        scheduler.apply(step_result(executor.run(plan)), now + seconds)
        now += max(seconds, STEP)
        assert now < 120.0, "the batch waits for ever"
    assert sum(seconds for _, seconds in spent[:-1]) <= SHARE * now
    return turns, now


@pytest.mark.parametrize(("row", "bound"), [(1e-3, None), (1e-3, 0.012), (1e-5, None)])
def test_others_that_are_always_open_do_not_hold_them_up_for_ever(row: float, bound: float | None) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    turns, _ = turns_of(seed, row, bound)
    assert any(rows > 1 for _, rows in turns)


@pytest.mark.parametrize(("bound", "turns"), [(0.0035, 0), (0.0045, 10)])
def test_a_turn_breaks_no_bound_of_an_open_request(bound: float, turns: int) -> None:
    """A step of one live row takes 3 ms, and with a row of the background's 4: within one bound, and not
    within the other, where the background rests until the request has ended."""
    config = SchedulerConfig(layers=4, max_positions=2048, max_running=8)
    weights = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": STEP, "forward_rows": 1e-3}
    cost, scheduler = (
        CostModel(weights).predict,
        Scheduler(BaseCache(config, PagePool(600, PAGE)), CostModel(weights), make_policy("hybrid")),
    )
    executor, now, beside, heard = ScriptedExecutor(PAGE, cost), 0.0, 0, list[float]()
    ends = {"batch": 40, "live": 700}

    def submit(name: str, slo: SLO) -> None:
        sampling = SamplingParams(max_tokens=ends[name], seed=1, ignore_eos=True)
        asked = Request(name, (5, 6), sampling, slo=slo, arrival=now, background=name == "batch")
        scheduler.requests.submit(asked, now)

    submit("batch", SLO())
    while scheduler.requests.has_work:
        if not heard and any(one.length == 4 for one in scheduler.requests.sequences.values()):
            submit("live", SLO(between_tokens=bound))  # two tokens of the batch are there
            heard.append(now)
        known = dict(scheduler.requests.sequences)
        plan = scheduler.plan(now).only
        beside += len({known[segment.key].request.id for segment in plan.inference}) == 2
        now += max(cost(plan), 1e-4)
        for events in scheduler.apply(step_result(executor.run(plan)), now).values():
            heard += [now for event in events if event.request_id == "live" and event.token is not None]
    gaps = [later - earlier for earlier, later in pairwise(heard[1:])]
    assert len(gaps) == ends["live"] - 1 and max(gaps) <= bound + 1e-9
    assert beside >= turns if turns else not beside
