"""Activated LoRA: from its invocation tokens on an adapter's rows are PEFT's, and before them the base's,
whose pages it shares."""

import random
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams
from coserve.adapters.files import write_adapter
from coserve.adapters.merge import merge_adapter
from coserve.errors import AdapterError, RequestError
from models import logits_of, prompts, save, tiny, with_lora

INVOKED = {"first": [7, 8], "second": [9, 7, 9]}
SAMPLING = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0, prompt_logprobs=0)
UNSCORED = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)
NEAR = 1e-5


def engine_of(folder: Path, **fields: object) -> tuple[Engine, dict[str, torch.nn.Module]]:
    """An engine with two activated adapters and a plain one, and the oracle of each."""
    settings = {"cache_tokens": 2048, "page_size": 4, "scheduler": {"max_prefill_rows": 16}, **fields}
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, **settings))  # type: ignore[arg-type]
    oracles: dict[str, torch.nn.Module] = {"": tiny("llama")}
    for seed, name in enumerate(("first", "second", "plain")):
        adapted = with_lora(tiny("llama"), seed, 0.6, alora_invocation_tokens=INVOKED.get(name))
        adapted.save_pretrained(str(folder / name))
        engine.adapters.load(name, folder / name)
        oracles[name] = adapted
    return engine, oracles


def expect_own(answer: object, prompt: list[int], oracle: torch.nn.Module) -> None:
    """Each token is the oracle's likeliest, with its log-probability, as are those of a scored prompt."""
    tokens = answer.tokens  # type: ignore[attr-defined]
    rows = logits_of(oracle, [*prompt, *tokens]).log_softmax(-1)
    assert tokens == rows[len(prompt) - 1 : -1].argmax(-1).tolist()
    scores = [*(answer.prompt_logprobs or ()), *answer.logprobs]  # type: ignore[attr-defined]
    wanted = rows[:-1].gather(-1, torch.tensor([*prompt, *tokens])[1:, None])[-len(scores) :, 0]
    assert float((torch.tensor([each.chosen for each in scores]) - wanted).abs().max()) < NEAR


def test_rows_are_pefts_and_pages_before_are_shared(tmp_path: Path) -> None:
    """Beside each other, in chunks, with invocations at any place of a page; of several the last one counts,
    and a later turn begins with what its adapter and the base have computed."""
    engine, oracles = engine_of(tmp_path)
    draws = random.Random(0)
    shared, other = prompts(draws, (40, 23))
    shared, other = ([10 + token % 80 for token in own] for own in (shared, other))
    asked = [
        ("", [*shared, 20]),
        ("first", [*shared, *INVOKED["first"], 30, 31]),
        ("second", [*shared, *INVOKED["second"]]),
        ("plain", [*shared, 7, 8]),
        ("first", [*INVOKED["first"], *other]),  # all of it
        ("second", [*other, *INVOKED["second"], 40, *INVOKED["second"], 41, 42]),
        ("first", [*shared, *INVOKED["first"], 30, 31, 50, 51, 52, 53, *INVOKED["first"]]),
    ]
    given = [(engine.generate(prompt, adapter=name or None, sampling=SAMPLING)) for name, prompt in asked]
    engine.run()
    for (name, prompt), answer in zip(asked, given, strict=True):
        expect_own(answer.result(), prompt, oracles[name])
    assert engine.stats().preemptions == 0
    # One after the other, unscored: those that share their beginning find its ten pages.
    found = []
    for name, prompt in asked[:4]:
        before = engine.stats().found_tokens
        expect_own(
            engine.generate(prompt, adapter=name or None, sampling=UNSCORED).result(), prompt, oracles[name]
        )
        found.append(engine.stats().found_tokens - before)
    # Pages from the invocation on are the adapter's alone.
    behind = [*shared, *INVOKED["first"], *range(30, 42)]
    for name in ("first", "", "first"):
        given_one = engine.generate(behind, adapter=name or None, sampling=UNSCORED)
        expect_own(given_one.result(), behind, oracles[name])
    fresh, _ = engine_of(tmp_path)
    apart = []
    for name, prompt in asked[:4]:
        before = fresh.stats().found_tokens
        expect_own(
            fresh.generate(prompt, adapter=name or None, sampling=UNSCORED).result(), prompt, oracles[name]
        )
        apart.append(fresh.stats().found_tokens - before)
    assert apart == [0, 40, 40, 0]  # a plain adapter shares nothing with the base
    assert found[3] >= 40


def test_preempted_ones_go_on(tmp_path: Path) -> None:
    engine, oracles = engine_of(tmp_path, cache_tokens=96)
    own = [[10 + token % 80 for token in one] for one in prompts(random.Random(1), (30, 25, 28))]
    asked = [[*one, *INVOKED["first"], 60] for one in own]
    given = [engine.generate(prompt, adapter="first", sampling=UNSCORED) for prompt in asked]
    engine.run()
    for prompt, answer in zip(asked, given, strict=True):
        expect_own(answer.result(), prompt, oracles["first"])


def test_what_they_do_not_do_is_refused(tmp_path: Path) -> None:
    engine, _ = engine_of(tmp_path)
    with pytest.raises(
        RequestError, match=r"acts from its invocation tokens on .7, 8., and the prompt has none"
    ):
        engine.generate([1, 2, 8, 7], adapter="first", sampling=UNSCORED)
    with pytest.raises(AdapterError, match="no alternative"):
        engine.generate([1, 7, 8], adapter="plain", alternatives=["first"], sampling=UNSCORED)
    with pytest.raises(AdapterError, match="cannot be merged"):
        merge_adapter(save(tiny("llama"), tmp_path / "model"), tmp_path / "first", tmp_path / "merged")
    for fields in ({"dora": True}, {"bias": "all"}, {"tokens": (1,)}, {"invocation": (1, -2)}):
        with pytest.raises(AdapterError, match="alora_invocation_tokens"):
            LoRAConfig(**{"invocation": (7, 8), **fields})  # type: ignore[arg-type]
    again = engine.adapters.weights("first")
    write_adapter(again, tmp_path / "again")
    assert engine.adapters.load("again", tmp_path / "again").parts[0].config.invocation == (7, 8)
