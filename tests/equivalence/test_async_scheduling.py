"""An engine that plans the next step while one runs answers and trains as one that does not."""

import random
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from transformers import AutoTokenizer

import coserve
from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.train.example import Example
from models import tiny

TOKENIZER = AutoTokenizer.from_pretrained(Path(coserve.__file__).parent / "tiny" / "weights")
GRAMMAR = str(LLMatcher.grammar_from_json_schema({"enum": ["one", "two", "three"]}))
SETTINGS = TrainingConfig(batch_size=3, rows=48, learning_rate=1e-3, epochs=2)


def run(ahead: bool, seed: int) -> tuple[list[tuple[tuple[int, ...], Any]], dict[str, torch.Tensor]]:
    """Answers, and the weights of a job that trains meanwhile, in steps of one fixed window each."""
    draws = random.Random(seed)
    config = EngineConfig(
        dtype="float64", calibrate=False, cache_tokens=256, page_size=8, max_running=4,
        async_scheduling=ahead, scheduler={"micro_batches_in_flight": 1, "training_window": 16},
    )  # fmt: skip
    model = tiny("llama", torch.float64, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    engine = Engine(model, config, tokenizer=TOKENIZER)
    lengths = [draws.randint(5, 40) for _ in range(9)]
    data = [Example(tuple(range(3, 3 + n)), (*range(4, 3 + n), -100)) for n in lengths]
    job = engine.finetune(data, "mine", LoRAConfig(rank=4), SETTINGS)
    handles = []
    for number in range(14):
        grammar = draws.choice((None, None, GRAMMAR))
        sampling = SamplingParams(
            max_tokens=draws.randint(1, 20), temperature=draws.choice((0.0, 1.0)), seed=number,
            grammar=grammar, ignore_eos=grammar is None and draws.random() < 0.3,
            frequency_penalty=draws.choice((0.0, 0.7)), logprobs=draws.choice((None, 2)),
            prompt_logprobs=draws.choice((None, None, 1)),
        )  # fmt: skip
        prompt = [draws.randrange(3, 200) for _ in range(draws.randint(1, 30))]
        handles.append(engine.generate(prompt, sampling=sampling))
        for _ in range(draws.randint(0, 3)):
            engine.step()
        if draws.random() < 0.15:
            draws.choice(handles[:-1] or handles).cancel()
    engine.run()
    assert job.status == "succeeded" and not engine.has_work
    answers = [(tuple(handle.result().tokens), handle.result().finish_reason) for handle in handles]
    return answers, dict(engine.adapters.weights("mine").parameters())


@pytest.mark.sample(1)
@pytest.mark.parametrize("_", range(3))
def test_answers_and_weights_are_the_same(_: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    (plain, weights), (ahead, same) = run(False, seed), run(True, seed)
    for (tokens, reason), (others, other) in zip(plain, ahead, strict=True):
        if "CANCELLED" in (reason.name, other.name):  # a step earlier or later
            shorter = min(len(tokens), len(others))
            assert tokens[:shorter] == others[:shorter]
        else:
            assert (tokens, reason) == (others, other)
    for name, tensor in weights.items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-9, atol=1e-12)
