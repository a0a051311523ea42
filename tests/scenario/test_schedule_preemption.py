"""Prompts of one token under a shortage of pages: preempted before they ran, they look like decoding ones."""

import secrets
from random import Random

import pytest

from coserve.core.request import Request, SamplingParams, VersionTraits
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor, next_token, virtual_tokens

PAGE, VOCABULARY = 4, 1000


def ask(draws: Random, arrival: float) -> Request:
    virtual = draws.choice((0, 8))
    adapter = f"a{virtual}@0" if virtual else None
    sampling = SamplingParams(max_tokens=draws.randint(1, 16))
    prompt, newcomer = (1,) * draws.choice((1, 1, 6)), draws.random() < 0.7
    traits = VersionTraits(virtual)
    return Request("r", prompt, sampling, adapter, arrival=arrival, traits=traits, newcomer=newcomer)


def expected(sequence: Sequence) -> list[int]:
    request, tokens = sequence.request, list[int]()
    before = [*virtual_tokens(request.adapter or "", request.traits.virtual), *request.prompt]
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token([*before, *tokens], VOCABULARY))
    return tokens


@pytest.mark.parametrize("ahead", [0, 2])
def test_prompts_of_one_token_are_preempted_like_all_others(ahead: int) -> None:
    preempted = 0
    for _ in range(30):
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        draws = Random(seed)
        config = SchedulerConfig(2, 64, max_running=8)
        pages = PagePool(draws.choice((8, 10, 14)), PAGE)
        it = Scheduler(BaseCache(config, pages), CostModel(), make_policy("hybrid"))
        executor = ScriptedExecutor(PAGE, plans_ahead=ahead)
        asked: list[Sequence] = []
        for _ in range(40):
            if draws.random() < 0.5:
                asked.append(it.requests.submit(ask(draws, executor.now), executor.now))
            executor.step(it)
        for _ in range(2000):
            if it.has_work:
                executor.step(it)
        assert [sequence.output for sequence in asked] == [expected(sequence) for sequence in asked]
        assert pages.free_count == pages.pages and not it.requests.running and not it.requests.waiting
        lost = sum(sequence.preemptions for sequence in asked)
        assert it.stats.preemptions == lost, "newcomers' are counted as well"
        preempted += lost
    assert preempted > 0, "pages are short"
