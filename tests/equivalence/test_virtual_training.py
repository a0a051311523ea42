"""Training of virtual tokens in the engine: alone or beside others, put down or resumed, it is the same."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve import Engine, EngineConfig, LoRAConfig, SamplingParams, TrainingConfig
from coserve.adapters.methods.p_tuning import PTuningConfig
from coserve.adapters.methods.prefix_tuning import PrefixTuningConfig
from coserve.adapters.methods.prompt_tuning import PromptTuningConfig
from coserve.errors import DataError
from coserve.train.checkpoint import read_checkpoint, write_checkpoint
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from coserve.train.state import TrainingState
from models import POSITIONS, Exact, prompts, tiny
from training_runs import keep_states
from virtual import with_virtual

METHODS: dict[str, object] = {
    "prefix": PrefixTuningConfig(5),
    "projected": PrefixTuningConfig(6, projection=True, hidden=20),
    "prompt": PromptTuningConfig(7),
    "encoded": PTuningConfig(4, encoder="LSTM", hidden=10),
    "both": [LoRAConfig(rank=3, dropout=0.1), PrefixTuningConfig(3), PromptTuningConfig(6)],
}
TRAINING = TrainingConfig(batch_size=4, epochs=2, learning_rate=1e-2, rows=48)
PAGE = 4
EXACTLY: dict[str, Any] = {
    "deterministic": True,
    "scheduler": {"training_window": 23, "min_training_rows": 1},
}


def engine_of(name: str, dtype: torch.dtype, **settings: object) -> Engine:
    cuts = {"max_training_rows": 24, "min_training_rows": 3, "max_prefill_rows": 16, "min_prefill_rows": 4}
    scheduler = {**cuts, "slowdown": None, **settings.pop("scheduler", {})}  # type: ignore[dict-item]
    config = {"calibrate": False, "page_size": PAGE, "cache_tokens": 1024, "scheduler": scheduler, **settings}
    return Engine(tiny(name, dtype), EngineConfig(**config))


def examples(count: int = 12, longest: int = 40) -> list[Example]:
    draws = random.Random("virtual training")
    made = prompts(draws, [draws.randint(2, longest) for _ in range(count)])
    return [Example(tuple(tokens), (*tokens[1:], -100)) for tokens in made]


def weights(engine: Engine, adapter: str) -> dict[str, Tensor]:
    return engine.adapters.weights(adapter).parameters()


def train_alone(engine: Engine, method: object) -> dict[str, Tensor]:
    engine.finetune(examples(), "alone", method, TRAINING)
    engine.run()
    return weights(engine, "alone")


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-30)) for n in one)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_all_methods_train_side_by_side_as_they_do_alone(name: str) -> None:
    """In one engine, among requests by all of them while they change."""
    with Exact():
        wanted = {n: train_alone(engine_of(name, torch.float64), method) for n, method in METHODS.items()}
        engine = engine_of(name, torch.float64)
        handles = {n: engine.finetune(examples(), n, method, TRAINING) for n, method in METHODS.items()}
        draws, answers = random.Random(name), []
        while engine.has_work:
            if len(answers) < 40:
                prompt = prompts(draws, [draws.randint(1, 20)])[0]
                adapter = draws.choice([None, *METHODS])
                answers.append(
                    engine.generate(prompt, adapter, SamplingParams(max_tokens=3, ignore_eos=True))
                )
            engine.step()
    assert all(handle.status == "succeeded" for handle in handles.values())
    assert all(len(answer.tokens) == 3 for answer in answers)
    assert engine.scheduler.stats.fused_steps > 5
    errors = {n: far(weights(engine, n), wanted[n]) for n in METHODS}
    assert max(errors.values()) <= 1e-7, errors  # 1e-15 a step, which AdamW's first steps divide by gradients


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_keeps_all_that_trains(method: str, tmp_path: Path) -> None:
    """Encoders too: what goes on from the disk is what would have been, bit by bit."""
    states: list[TrainingState] = []
    engine = engine_of("llama", torch.float32, **EXACTLY)
    engine.finetune(
        examples(),
        "mine",
        METHODS[method],
        TRAINING,
        keeping=keep_states(states, 2),
    )
    engine.run()
    wanted = weights(engine, "mine")
    state = next(state for state in states if state.step == 2)
    kept = write_checkpoint(tmp_path, state)
    again = engine_of("llama", torch.float32, **EXACTLY)
    resume = read_checkpoint(kept.path, "mine", again.base, torch.float32)
    again.finetune(examples(), "mine", METHODS[method], TRAINING, resume=resume)
    again.run()
    found = weights(again, "mine")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
def test_losses_fall(method: str) -> None:
    engine = engine_of("llama", torch.float32)
    data = examples(4, 12) * 4
    training = TrainingConfig(batch_size=4, epochs=8, learning_rate=0.05, schedule="constant")
    losses = [step.loss for step in engine.finetune(data, "mine", METHODS[method], training)]
    assert len(losses) == 32
    assert losses[-1] < 0.8 * losses[0]


def test_training_goes_on_from_a_file_without_its_encoder_and_says_so(tmp_path: Path) -> None:
    with_virtual(tiny("llama"), "p-tuning").save_pretrained(str(tmp_path))
    engine = engine_of("llama", torch.float32)
    engine.adapters.load("theirs", tmp_path)
    with pytest.warns(UserWarning, match="theirs: the file does not hold the encoder"):
        engine.finetune(examples(), "mine", training=TRAINING, start_from="theirs")
    engine.run()
    ((path, trained),) = weights(engine, "mine").items()
    ((_, before),) = weights(engine, "theirs").items()
    assert path.endswith("prompt_embeddings") and trained.shape == before.shape
    assert not torch.equal(trained, before)


def test_examples_have_to_fit_behind_the_virtual_tokens() -> None:
    engine = engine_of("llama", torch.float32)
    tokens = tuple(range(1, 90)) * 3
    for length, fits in ((POSITIONS - 7, True), (POSITIONS - 6, False)):
        example = Example(tokens[:length], (*tokens[1:length], -100))
        if fits:
            engine.finetune([example], f"of {length}", PromptTuningConfig(7), TRAINING)
            continue
        with pytest.raises(
            DataError, match=r"the 249 of the model's 256 positions that virtual .* has 250 tokens"
        ):
            engine.finetune([example], f"of {length}", PromptTuningConfig(7), TRAINING)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_same_in_a_crowd_where_that_is_promised(dtype: torch.dtype) -> None:
    """Deterministic mode: answers alone and among others with few pages, training alone and beside them."""
    draws = random.Random("bits")
    asked = [
        (prompt, name, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0))
        for prompt, name in zip(
            prompts(draws, [draws.randint(1, 30) for _ in range(9)]),
            [*METHODS, None, "prefix", "both", "encoded"],
            strict=True,
        )
    ]

    def make(cache_tokens: int) -> Engine:
        engine = engine_of("llama", dtype, **EXACTLY, cache_tokens=cache_tokens)
        for n, method in METHODS.items():
            adapter = fresh_adapter(engine.base, n, method, 3)
            own = {name: tensor.to(dtype) for name, tensor in adapter.parameters().items()}
            engine.adapters.add(adapter.with_parameters(own))
        return engine

    quiet = make(1024)
    alone = [quiet.generate(*one).result() for one in asked]
    wanted = train_alone(make(1024), METHODS["both"])
    crowd = make(60)
    crowd.finetune(examples(), "alone", METHODS["both"], TRAINING)
    answers = [crowd.generate(*one) for one in asked]
    crowd.run()
    assert crowd.scheduler.stats.preemptions > 0
    for one, other in zip(alone, answers, strict=True):
        assert (one.tokens, one.logprobs, one.prompt_logprobs) == (
            other.tokens,
            other.logprobs,
            other.prompt_logprobs,
        )
    found = weights(crowd, "alone")
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
