"""Drafts in steps: as many as there are rows, pages and time for, and only where they pay."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from coserve.core import speculation
from coserve.core.plan import InferenceSegment
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.speculation import SpeculativeConfig
from coserve.memory.pages import PagePool
from coserve.schedule import scheduler
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swapping import Swapping
from scripted_executor import ScriptedExecutor

PAGE, MOST, RUNNING = 4, 8, 3


class World:
    """Answers that repeat themselves, to the end of all."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        requests: int,
        weights: Mapping[str, float] | None = None,
        pages: int = 200,
        drafts: int = MOST,
        slo: SLO = SLO(),
        tokens: int = 60,
        prompt: Sequence[int] = (5,),
    ) -> None:
        monkeypatch.setattr(CostModel, "observe", lambda *_: None)
        cost = CostModel({**DEFAULT_WEIGHTS, **(weights or {})})
        speculation = SpeculativeConfig(drafts, prompt_lookup_max=2, prompt_lookup_min=1)
        config = SchedulerConfig(3, 4096, max_running=RUNNING, speculation=speculation)
        self.pool = PagePool(pages, PAGE)
        self.it = Scheduler(BaseCache(config, self.pool, Swapping(cost)), cost, make_policy("hybrid"))
        self.executor = ScriptedExecutor(PAGE, None, 7, memory=1)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for number in range(requests):
            self.it.requests.submit(Request(f"{number}", (number, *prompt), sampling, slo=slo), 0.0)
        while self.it.has_work:
            self.executor.step(self.it)
            for sequence in self.it.requests.running:
                assert sorted(self.pool.owners[sequence.key]) == sorted(sequence.pages), "pages went back"

    @property
    def steps(self) -> list[list[InferenceSegment]]:
        """The decode rows of each step, with their drafts."""
        plans = [[one for one in plan.inference if one.start > 1] for plan in self.executor.plans]
        return [rows for rows in plans if rows]


def test_one_answer_takes_several_tokens_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    stats = world.it.stats
    assert max(len(one.drafts) for rows in world.steps for one in rows) == MOST
    assert len(world.steps) == 59 - stats.accepted_tokens < 30
    assert stats.decode_tokens == 59 and stats.accepted_tokens <= stats.draft_tokens
    assert world.pool.free_count == 200


def test_rows_are_bounded_by_what_memory_is_reserved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 5)
    rows = [sum(one.length for one in step) for step in world.steps]
    assert RUNNING + 1 < max(rows) <= RUNNING + MOST == world.it.config.sampled_rows


def test_drafts_are_left_out_where_rows_are_what_a_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = {"forward_rows": 1.0, "tail_rows": 1.0}
    assert World(monkeypatch, 1, dear).it.stats.drafts == 0
    few = World(monkeypatch, 3, {"forward_rows": 2e-3, "forward_layers": 1e-3}).it.stats
    many = World(monkeypatch, 3).it.stats
    assert few.draft_tokens < many.draft_tokens


def test_drafts_keep_the_tightest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {**dict.fromkeys(DEFAULT_WEIGHTS, 0.0), "step": 1e-2, "forward_rows": 1e-3}
    free, bound = (
        World(monkeypatch, 1, weights),
        World(monkeypatch, 1, weights, slo=SLO(between_tokens=0.0131)),
    )

    def longest(world: World) -> int:
        return max(len(one.drafts) for rows in world.steps for one in rows)

    assert longest(free) == MOST and 1 <= longest(bound) <= 2


def test_pages_for_drafts_are_taken_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers of 16 pages each fit exactly."""
    world = World(monkeypatch, 3, pages=3 * 16, tokens=62)
    assert world.it.stats.preemptions == 0 and world.it.stats.accepted_tokens > 50
    assert world.pool.free_count == world.pool.pages


def test_what_a_plan_reads_of_long_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 3,000 tokens whose answers repeat them: each is read in parts, then drafted from."""
    read, plain, drafting = list[int](), speculation._hash, scheduler.add_drafts

    def counted(*given: Any) -> int:
        read[-1] += 1
        return plain(*given)

    def planned(*given: Any) -> Any:
        read.append(0)
        return drafting(*given)

    monkeypatch.setattr(speculation, "_hash", counted)
    monkeypatch.setattr(scheduler, "add_drafts", planned)
    world = World(monkeypatch, 3, pages=4000, tokens=80, prompt=[5, 6] * 1500)
    assert 2 * 1024 < sum(read[:-1]) < 3 * 3200, "each token once"
    assert 900 < max(read) <= 1024 + 3 * speculation.NEW_TOKENS
    assert world.it.stats.accepted_tokens > 50
