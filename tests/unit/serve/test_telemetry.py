"""Samples of what is answered and trained, and the messages of those who watch."""

import asyncio
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from msgspec.structs import replace

from coserve.serve import telemetry
from coserve.serve.answering.fair import FairQueue
from coserve.serve.store.records import Tenant
from coserve.serve.telemetry import FIELDS, MOST_NAMES, MOST_SAMPLES, MOST_TENANTS, MOST_VIEWERS, Telemetry
from coserve.wire.messages import EngineStats, JobStep

ANN, BOB = Tenant("a", "ann"), Tenant("b", "bob")
STATS = EngineStats(
    steps=0, fused_steps=0, decode_tokens=0, prefill_tokens=0, trained_tokens=0, updates=0, preemptions=0,
    running=0, waiting=0, pages=100, free_pages=25, cost_error=0.0, slo_met=0, slo_missed=0, adapters=3,
    memory={"base": 7}, memory_budget=9,
)  # fmt: skip


class Link:
    """As much of a link as is asked."""

    hello, silence, ready = None, 0.0, True
    stats: EngineStats | None = None


class Watched:
    def __init__(self) -> None:
        self.link: Any = Link()
        self.now, self.draining = 1000.0, False
        self.told = Telemetry(FairQueue(9, 9), self.link, lambda: self.draining, lambda: self.now)

    def sample(self, **counters: Any) -> dict[str, Any]:
        """The common figures of a sample, a second after the last."""
        self.now += 1
        if counters:
            self.link.stats = replace(self.link.stats or STATS, **counters)
        self.told.sample()
        return dict(zip(FIELDS, json.loads(self.told._samples[-1].row), strict=True))

    def step(self, tenant: Tenant, job: str, loss: float, tokens: int = 10) -> None:
        self.told.trained(tenant.id, JobStep(job, 3, loss, 1, tokens, 0.0, 0.0, 0.0))


async def told_to(events: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    return dict(json.loads(await anext(events)))


def test_rates_are_differences_over_the_time_between_reports() -> None:
    watched = Watched()
    first = watched.sample(steps=100, decode_tokens=50)
    assert first["steps"] == first["answered"] == 0 and first["pages_used"] == 0.75 and first["adapters"] == 3
    second = watched.sample(
        steps=140, decode_tokens=350, prefill_tokens=8, trained_tokens=70, slo_met=3, slo_missed=1,
        fused_steps=9, answer_seconds=8.0, answer_deferred_seconds=2.0,
    )  # fmt: skip
    names = ("steps", "fused_steps", "answered", "prompt", "trained", "met", "missed", "deferred")
    assert [second[name] for name in names] == [40, 9, 300, 8, 70, 3, 1, 0.25]
    held = watched.sample()  # no report in this second: the rates of the last one hold
    assert held["steps"] == 40
    later = watched.sample(steps=240)
    assert later["steps"] == 50 and later["deferred"] == 0  # 100 in two seconds; no answer ended
    assert watched.sample(steps=5)["steps"] == 0  # another engine's counters
    watched.link.stats = None
    gone = watched.sample()
    assert gone["steps"] == gone["pages_used"] == 0


def test_latencies_are_those_of_the_second() -> None:
    """Against sums over all tokens, drawn at random."""
    draw, watched = random.Random(0), Watched()
    meters = {(t.id, m): watched.told.meter(t.id, m) for t in (ANN, BOB) for m in ("x", "y")}
    for _ in range(20):
        gaps, firsts, tokens = [], [], defaultdict[tuple[str, str], int](int)
        for _ in range(draw.randrange(30)):
            who, seconds = draw.choice(list(meters)), draw.random()
            tokens[who] += 1
            if draw.random() < 0.3:
                meters[who].first(seconds)
                firsts.append(seconds)
            else:
                meters[who].next(seconds)
                gaps.append(seconds)
        seen = watched.sample()
        for name, found in (("gap", gaps), ("first_token", firsts)):
            assert (seen[name] is None) == (not found)
            assert not found or math.isclose(seen[name], sum(found) / len(found), rel_tol=1e-3)
        assert (
            seen["slowest_gap"] is None
            if not gaps
            else math.isclose(seen["slowest_gap"], max(gaps), rel_tol=1e-3)
        )
        own = watched.told._samples[-1].own
        for tenant in (ANN, BOB):
            counts = {m: tokens[tenant.id, m] for m in ("x", "y") if tokens[tenant.id, m]}
            told = json.loads(own.get(tenant.id, b'{"models": {}}'))["models"]
            assert {model: row[0] for model, row in told.items()} == counts
    for meter in meters.values():
        meter.users -= 1
    watched.sample()
    watched.sample()
    assert not watched.told._meters


def test_messages_show_the_past_then_each_second_once() -> None:
    async def story() -> None:
        watched = Watched()
        watched.step(ANN, "job-a", 2.0)
        watched.sample()
        watched.step(BOB, "job-b", math.inf)
        watched.sample()
        ann, second, bob = (watched.told.follow(t) for t in (ANN, ANN, BOB))
        past = await told_to(ann)
        assert past["fields"] == list(FIELDS) and [row[0] for row in past["rows"]] == [1001.0, 1002.0]
        assert past["own"] == [{"models": {}, "jobs": {"job-a": [2.0, 10, 3]}}, None]
        assert (await told_to(bob))["own"] == [None, {"models": {}, "jobs": {"job-b": [None, 10, 3]}}]
        await anext(second)
        waiting = [asyncio.ensure_future(anext(one)) for one in (ann, second, bob)]
        await asyncio.sleep(0)
        watched.step(ANN, "job-a", 1.5)
        watched.sample(steps=4)
        one, same, other = await asyncio.gather(*waiting)
        assert one is same and one != other  # made once for all viewers of a tenant
        told = json.loads(one)
        assert told["fields"] is None and len(told["rows"]) == 1 and told["now"]["memory"] == {"base": 7}
        assert b"job-a" not in other
        for _ in range(3):  # a slow reader gets what it has missed at once
            watched.sample()
        assert len((await told_to(ann))["rows"]) == 3
        later = watched.told.follow(BOB)  # whose first message has one sample more, or one alone
        assert (await told_to(later))["fields"] == list(FIELDS)
        watched.draining = True
        rest = asyncio.ensure_future(anext(later, None))
        await asyncio.sleep(0)
        watched.sample()
        assert (
            await rest is None and await anext(ann, None) is None
        )  # or pages would delay the end by seconds

    asyncio.run(asyncio.wait_for(story(), 60))
    alone = Watched()
    alone.sample()
    assert asyncio.run(told_to(alone.told.follow(ANN)))["fields"] == list(FIELDS)


def test_everything_is_bounded() -> None:
    async def story() -> None:
        watched = Watched()
        for tenant in range(3 * MOST_TENANTS):
            watched.step(Tenant(str(tenant), ""), "job", 1.0, tokens=tenant + 1)
        for job in range(3 * MOST_NAMES):
            watched.step(ANN, f"job-{job}", 1.0, tokens=100)
            meter = watched.told.meter(ANN.id, f"{job} " + "x" * 9000)
            meter.first(1.0)
        watched.sample()
        own = watched.told._samples[-1].own
        assert len(own) == MOST_TENANTS and ANN.id in own and "0" not in own  # those with most tokens
        mine = json.loads(own[ANN.id])
        assert len(mine["models"]) == len(mine["jobs"]) == MOST_NAMES and len(own[ANN.id]) < 5000
        for _ in range(MOST_SAMPLES + 5):
            watched.sample()
        viewers = [watched.told.follow(ANN) for _ in range(MOST_VIEWERS + 2)]
        first = [await anext(one, None) for one in viewers]
        assert [one is not None for one in first] == [True] * MOST_VIEWERS + [False] * 2
        assert len(json.loads(first[0] or b"")["rows"]) == MOST_SAMPLES
        assert watched.told.is_full(ANN) and not watched.told.is_full(BOB)
        for one in viewers:
            await one.aclose()
        assert not watched.told._viewers

    asyncio.run(asyncio.wait_for(story(), 60))


def test_three_viewers_cost_less_than_a_hundredth_of_a_processor() -> None:
    """Two hundred samples with eight models and four jobs, of one tenant with three viewers."""

    async def story() -> float:
        watched = Watched()
        meters = [watched.told.meter(ANN.id, f"model {n}") for n in range(8)]
        watched.sample(steps=1)
        viewers = [watched.told.follow(ANN) for _ in range(3)]
        for one in viewers:
            await anext(one)
        began = time.process_time()
        for second in range(200):
            for meter in meters:
                meter.next(0.01)
            for job in range(4):
                watched.step(ANN, f"job {job}", 1.0)
            waiting = [asyncio.ensure_future(anext(one)) for one in viewers]
            await asyncio.sleep(0)
            watched.sample(steps=second + 2)
            await asyncio.gather(*waiting)
        return time.process_time() - began

    assert asyncio.run(story()) < 200 * telemetry.SAMPLE_SECONDS / 100
