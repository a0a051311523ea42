"""Embeddings against transformers' own hidden states, with PEFT's adapters, however prompts are cut and
whatever runs beside them."""

import random
from pathlib import Path

import pytest
import torch

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.events import TokenEvent
from coserve.core.request import POOLINGS, FinishReason, Request
from coserve.core.sequence import Sequence
from coserve.engine.completion import Completion
from coserve.wire.scores import little
from mixed import SMALL, make_engine
from models import Exact, tiny, with_lora

RELATIVE = 1e-5  # embeddings are told in float32


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [[draw.randrange(1, SMALL) for _ in range(draw.choice((1, 3, 17, 40)))] for _ in range(count)]


def embed(engine: Engine, prompt: list[int], pooling: str, adapter: str | None) -> Completion:
    return engine.generate(prompt, adapter, SamplingParams(max_tokens=0, pooling=pooling), text=False)


def expected(model: torch.nn.Module, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        told = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    last: torch.Tensor = told.hidden_states[-1][0]
    return last.mean(0) if pooling == "mean" else last[-1]


def agrees(found: Completion, wanted: torch.Tensor) -> None:
    assert (len(found.embedding), found.tokens) == (len(wanted), [])
    told = torch.tensor(found.embedding, dtype=torch.float64)
    assert (told - wanted).norm() <= RELATIVE * wanted.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])  # one with capped logits, one with biases
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    draw = random.Random(f"embeddings {name}")
    with_lora(tiny(name, torch.float64, vocab_size=SMALL), 1).save_pretrained(str(tmp_path / "lora"))
    with Exact():
        base = tiny(name, torch.float64, vocab_size=SMALL)
        adapted = with_lora(tiny(name, torch.float64, vocab_size=SMALL), 1)
        engine = make_engine(name, torch.float64, tmp_path)
        asked = [
            (prompt, pooling, adapter)
            for prompt in prompts(draw, 3)
            for pooling in POOLINGS
            for adapter in (None, "lora")
        ]
        beside = engine.generate([1, 2, 3], sampling=SamplingParams(max_tokens=30, ignore_eos=True))
        handles = [embed(engine, *one) for one in asked]
        engine.run()
        assert len(beside.tokens) == 30
        for handle, (prompt, pooling, adapter) in zip(handles, asked, strict=True):
            agrees(handle, expected(base if adapter is None else adapted, prompt, pooling))


def test_a_prompt_that_is_read_anew_counts_once() -> None:
    """Pages run out, so that prompts are preempted in the middle; found beginnings are no part of a mean."""
    draw = random.Random("preempted")
    with Exact():
        base = tiny("llama", torch.float64, vocab_size=SMALL)
        config = EngineConfig(
            calibrate=False,
            cache_tokens=96,
            page_size=4,
            scheduler={"max_prefill_rows": 8, "min_prefill_rows": 4},
        )
        engine = Engine(tiny("llama", torch.float64, vocab_size=SMALL), config)
        begin = [draw.randrange(1, SMALL) for _ in range(40)]
        asked = [[*begin, *prompt] for prompt in prompts(draw, 6)]
        answers = [
            engine.generate(prompt[:20], sampling=SamplingParams(max_tokens=40, ignore_eos=True))
            for prompt in asked[:3]
        ]
        handles = [embed(engine, prompt, POOLINGS[i % 2], None) for i, prompt in enumerate(asked)]
        engine.run()
        assert engine.stats().preemptions and all(len(one.tokens) == 40 for one in answers)
        for i, (handle, prompt) in enumerate(zip(handles, asked, strict=True)):
            agrees(handle, expected(base, prompt, POOLINGS[i % 2]))


def test_the_deterministic_mode_embeds_by_pieces() -> None:
    base, prompt = tiny("llama", torch.float32, vocab_size=SMALL), [token % SMALL for token in range(1, 36)]
    config = EngineConfig(calibrate=False, cache_tokens=256, deterministic=True)
    engine = Engine(tiny("llama", torch.float32, vocab_size=SMALL), config)
    agrees(embed(engine, prompt, "mean", None).result(), expected(base, prompt, "mean").double())


def test_a_part_that_restarts_replaces_those_before_it() -> None:
    prompt = Request("r", (5, 6, 7, 8), SamplingParams(max_tokens=0, pooling="mean"))
    handle = Completion(Sequence(1, prompt), None, lambda: False, lambda: None)
    for values, restarts in (
        ([1.0, 2.0], True),
        ([9.0, 9.0], False),
        ([2.0, 4.0], True),
        ([6.0, 4.0], False),
    ):
        part = little("f", values)
        handle.take(TokenEvent(1, "r", None, pooled=part, restarts=restarts))
    handle.finish(FinishReason.LENGTH)
    assert handle.embedding.tolist() == [2.0, 2.0]
