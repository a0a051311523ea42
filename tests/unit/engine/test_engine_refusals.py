"""Input that a step could not digest is refused before it gets there, and the engine goes on."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.errors import ConfigError, CoserveError, DataError, LossNotFinite, RequestError
from coserve.train.example import Example
from models import tiny

SMALL = LoRAConfig(rank=2)


def test_a_cache_that_no_machine_holds() -> None:
    with pytest.raises(ConfigError, match=r"cache_tokens.*do not fit"):
        Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=10**14))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("gpt2", max_position_embeddings=64), EngineConfig(calibrate=False, cache_tokens=256))


def still_answers(engine: Engine) -> bool:
    return (
        len(engine.generate([3, 4], sampling=SamplingParams(max_tokens=2, ignore_eos=True)).result().tokens)
        == 2
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ("",)},
        {"stop": "abc"},
        {"logprobs": True},
        {"max_tokens": 2.5},
        {"top_k": 2.5},
        {"seed": "1"},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {"1": 1.0}},
        {"stop_token_ids": ("a",)},
    ],
    ids=str,
)
def test_sampling(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(fields))}"):
        SamplingParams(**fields)


def test_a_bias_may_forbid_a_token() -> None:
    assert SamplingParams(logit_bias={1: -math.inf}).logit_bias[1] == -math.inf


@pytest.mark.parametrize("prompt", [None, 7, [1.5], [[1]]], ids=str)
def test_prompts_of_another_kind(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is text, token ids or messages"):
        engine.generate(prompt)
    assert still_answers(engine)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: [Example((1,) * 65, (1,) * 65)],
            "^1 of 1 example is longer than the model's 64 positions; the longest, example 1, has 65 tok",
        ),
        (lambda: [Example((1, 10**6), (2, 3))], "example 1 has a token"),
        (lambda: [Example((1, 2), (2, 10**6))], "example 1 has a token"),
        (lambda: [Example((1, -2), (2, 3))], "example 1 has a token"),
        (
            lambda: [Example((1, 2), (-100, -100))],
            "none of 1 example is left to train on: 1 has nothing to learn",
        ),
        (lambda: [Example((1, 2), (2,))], "a label for each"),
        (lambda: [Example((), ())], "a label for each"),
    ],
)
def test_examples(engine: Engine, make: Callable[[], list[Example]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        engine.finetune(make(), "mine", SMALL)
    assert still_answers(engine)


def test_token_examples_are_cut_and_counted(engine: Engine) -> None:
    data = [Example(tuple(range(1, 51)), (*range(2, 51), -100)), Example((1, 2), (-100, -100))]
    prepared = engine.prepare(data, TrainingConfig(max_length=10, too_long="truncate"))
    assert (prepared.counts.truncated, prepared.counts.dropped) == (1, 1)
    assert prepared.examples == (Example(tuple(range(1, 11)), (*range(2, 11), -100)),)


@pytest.mark.parametrize(
    "fields",
    [
        {"betas": (1.5, 0.9)},
        {"weight_decay": -1.0},
        {"epsilon": -1.0},
        {"epochs": 1.5},
        {"max_grad_norm": -1.0},
        {"loss_on": "x"},
        {"keep": "most"},
        {"learning_rate": math.inf},
    ],
    ids=str,
)
def test_training(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"training.{next(iter(fields))}"):
        TrainingConfig(**fields)


def test_iterating_a_failed_job_raises_what_made_it_fail(engine: Engine) -> None:
    data = [Example((1, 2, 3), (2, 3, -100))] * 8
    job = engine.finetune(
        data, "lost", SMALL, TrainingConfig(learning_rate=1e20, batch_size=1, warmup_ratio=0.0)
    )
    with pytest.raises(LossNotFinite):
        list(job)
    assert job.status == "failed" and still_answers(engine)


def test_an_adapter_is_not_written_onto_a_file(engine: Engine, tmp_path: Any) -> None:
    engine.finetune([Example((1, 2), (2, -100))], "saved", SMALL).result()
    (tmp_path / "file").write_text("")
    with pytest.raises(CoserveError, match="cannot be written"):
        engine.adapters.save("saved", tmp_path / "file")
