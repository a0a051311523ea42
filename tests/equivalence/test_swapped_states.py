"""Sequences of a model with recurrent layers that were preempted: their pages come back from the second tier,
their states from where they were set aside, and they answer as if they had never lost them."""

import random
import secrets
from typing import Any

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.engine.completion import Completion
from coserve.schedule.cost import CostModel
from coserve.schedule.swap_tier import Rate
from coserve.train.fresh import fresh_adapter
from models import prompts
from recurrent import build

PAGE, STOP, TRIES = 4, 3, 16
Answers = list[tuple[list[int], list[float]]]  # tokens and their log-probabilities


@pytest.fixture(autouse=True)
def moves_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier as fast as guessed, whatever else the machine does."""
    monkeypatch.setattr(Rate, "observe", lambda *_: None)
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)


def run(seed: int, tokens: int, swap: str, **settings: Any) -> tuple[Answers, Engine]:
    """Answers of an engine with so many cached tokens to requests, some with a beginning in common and some
    that are cancelled."""
    config = EngineConfig(
        calibrate=False, page_size=PAGE, cache_tokens=tokens, max_running=5, swap_space=swap,
        scheduler={"max_prefill_rows": 16}, dtype="float32", **settings,
    )  # fmt: skip
    engine, draws = Engine(build("qwen3_5_text"), config), random.Random(seed)
    engine.adapters.add(fresh_adapter(engine.base, "lora", LoRAConfig(rank=2), 1))
    common = prompts(draws, [70])[0]
    asked: list[tuple[Completion, bool]] = []  # whether it is cancelled
    for prompt in prompts(draws, [draws.randint(1, 30) for _ in range(7)]):
        sampling = SamplingParams(
            max_tokens=draws.randint(8, 24), ignore_eos=True, logprobs=0, seed=draws.randrange(1000),
            temperature=draws.choice((0.0, 1.0)),
        )  # fmt: skip
        prompt, adapter = draws.choice((prompt, common + prompt[:5])), draws.choice((None, "lora"))
        asked.append((engine.generate(prompt, adapter, sampling, scope="one"), draws.random() < 0.2))
        for _ in range(draws.randint(0, 3)):
            engine.step()
    while engine.has_work:
        for answer, stops in asked:
            if stops and len(answer.tokens) >= STOP:
                answer.cancel()
        engine.step()
    states = engine.scheduler.caches.first.prefixes.states
    assert states is None or not (states._held or states._aside), "places are given back"
    assert engine.pages.free_count == engine.pages.pages
    found = [(a.tokens, [p.chosen for p in a.logprobs], STOP if stops else None) for a, stops in asked]
    return [(tokens[:stop], logprobs[:stop]) for tokens, logprobs, stop in found], engine


@pytest.mark.parametrize(("deterministic", "ahead", "sharing"), [(True, False, True), (False, True, False)])
def test_answers_are_the_same_with_pages_and_states_that_came_back(
    deterministic: bool, ahead: bool, sharing: bool
) -> None:
    settings = {"deterministic": deterministic, "async_scheduling": ahead, "prefix_sharing": sharing}
    for _ in range(TRIES):  # in half of the draws a sequence is preempted and comes back
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        whole, alone = run(seed, 2000, "0", **settings)
        swapped, engine = run(seed, 104, "1GiB", **settings)
        assert not engine.stats().swap_failures and not alone.stats().preemptions
        assert [tokens for tokens, _ in swapped] == [tokens for tokens, _ in whole]
        for (_, mine), (_, theirs) in zip(swapped, whole, strict=True):
            assert mine == (theirs if deterministic else pytest.approx(theirs, abs=1e-4))
        if engine.stats().swapped_in_pages and engine.stats().preemptions:
            return
    pytest.fail(f"none of {TRIES} draws brought pages back")
