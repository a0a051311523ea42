"""Requests with different options in one step, and the engine's state after they end."""

import math
import random

import pytest
import torch

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.core.row_buckets import EXACT, ONEDNN
from coserve.errors import RequestError
from coserve.kernels.cpu import row_buckets
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from models import prompts, tiny


def make_engine(seed: int = 0) -> Engine:
    return Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=512, seed=seed))


@pytest.fixture
def engine() -> Engine:
    return make_engine()


def test_each_request_gets_as_many_alternatives_as_it_asked_for(engine: Engine) -> None:
    asked = (3, None, 0, 5)
    answers = [
        engine.generate(prompt, sampling=SamplingParams(max_tokens=4, ignore_eos=True, logprobs=wanted))
        for prompt, wanted in zip(prompts(random.Random("top"), [6] * 4), asked, strict=True)
    ]
    engine.run()
    for answer, wanted in zip(answers, asked, strict=True):
        assert [len(row.top) for row in answer.logprobs] == ([] if wanted is None else [wanted] * 4)


def draws(engine: Engine) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5)
    return [engine.generate([1, 2, 3], sampling=sampling).result().tokens for _ in range(3)]


def test_requests_without_a_seed_draw_otherwise_and_the_engine_s_seed_repeats_them(engine: Engine) -> None:
    one = draws(engine)
    assert len({tuple(tokens) for tokens in one}) == 3
    assert draws(make_engine()) == one
    assert draws(make_engine(seed=1)) != one


def test_what_was_asked_of_the_sampler_goes_with_the_request(engine: Engine) -> None:
    """A greedy batch after it is one argmax again."""
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, presence_penalty=1.0, ignore_eos=True)
    engine.generate([1, 2, 3], sampling=params).result()
    engine.run()
    sampling = engine.executor.worker.table.sampling
    assert sampling.is_plain and not sampling.drawing and not sampling.nucleus


def test_training_a_name_again_takes_numbers_that_nobody_has(engine: Engine) -> None:
    """An answer that still runs on the first job's version must not come to mean the second's."""
    data = [Example((5, 6, 7), (6, 7, -100))] * 2
    training = TrainingConfig(batch_size=1)
    first = engine.finetune(data, "mine", LoRAConfig(rank=2), training).result()
    assert first.history[-1].version == "mine@2"
    held = engine.adapters.weights("mine")
    running = engine.generate([1, 2], "mine", SamplingParams(max_tokens=100, ignore_eos=True))
    second = engine.finetune(data, "mine", LoRAConfig(rank=2), training)
    assert (
        engine.adapters.weights("mine").key == "mine@3" and engine.adapters.weights("mine@2").key == held.key
    )
    assert [update.version for update in second.result().history] == ["mine@4", "mine@5"]
    running.cancel()
    engine.run()


def test_the_scheduler_and_the_base_have_the_device_s_row_buckets(engine: Engine) -> None:
    assert engine.scheduler.config.row_buckets == engine.base.row_buckets == ONEDNN
    assert row_buckets(torch.device("meta")) == EXACT


def test_an_adapter_in_another_type_is_served_in_the_base_s() -> None:
    """Keys and values of a prefix go into pages as they are."""
    engine = Engine(tiny("llama", dtype=torch.bfloat16), EngineConfig(calibrate=False, cache_tokens=256))
    engine.adapters.add(fresh_adapter(engine.base, "mine", PrefixTuningConfig(tokens=3), 0))
    greedy = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(engine.generate([1, 2, 3], "mine", greedy).result().tokens) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_for_which_no_token_is_left_fails_alone(engine: Engine, temperature: float) -> None:
    fine = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = engine.generate([5, 6, 7], sampling=fine).result().tokens
    none_left = dict.fromkeys(range(engine.base.vocabulary), -math.inf)
    sampling = SamplingParams(
        max_tokens=12, temperature=temperature, logit_bias=none_left, logprobs=1, seed=1
    )
    wrong = engine.generate([5, 6, 7], sampling=sampling)
    beside = engine.generate([5, 6, 7], sampling=fine)
    engine.run()
    assert beside.result().tokens == alone
    with pytest.raises(RequestError, match="no token can come next: the grammar, logit_bias"):
        wrong.result()
    assert engine.generate([5, 6, 7], sampling=fine).result().tokens == alone
