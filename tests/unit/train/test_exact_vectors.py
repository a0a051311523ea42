"""Scales and biases over a bfloat16 base: what they serve is as exact as what trains."""

import random
from pathlib import Path

import pytest
import torch

from coserve import LoRAConfig, TrainingConfig
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.methods.bitfit import BitFitConfig
from coserve.adapters.methods.ia3 import IA3Config
from coserve.train.example import Example
from coserve.train.fresh import fresh_adapter
from methods import engine_of
from models import prompts

CPU = torch.device("cpu")


def make_examples(seed: str, count: int) -> list[Example]:
    return [Example(t, (*t[1:], -100)) for t in map(tuple, prompts(random.Random(seed), [12] * count))]


def types(adapter: AdapterVersion) -> set[torch.dtype]:
    return {tensor.dtype for tensor in adapter.parameters().values()}


@pytest.mark.parametrize("config", [IA3Config(), BitFitConfig()])
def test_small_steps_are_not_rounded_away(config: object, tmp_path: Path) -> None:
    """Between 1 and the next number in bfloat16 there are 78 such steps."""
    engine = engine_of("qwen2", torch.bfloat16)
    training = TrainingConfig(learning_rate=1e-4, batch_size=2, max_steps=2, warmup_ratio=0.0)
    job = engine.finetune(make_examples("small", 4), "mine", config, training).result()
    assert job.status == "succeeded"
    tuned = engine.adapters.weights("mine")
    first = fresh_adapter(engine.base, "mine", config, training.seed).parameters()
    for name, tensor in tuned.parameters().items():
        assert tensor.dtype == torch.float32
        change = float((tensor - first[name]).abs().max())
        assert 0.5e-4 < change < 3e-4, name
    engine.adapters.save("mine", tmp_path)
    again = engine.adapters.load("again", tmp_path)
    assert types(again) == {torch.float32}
    for name, tensor in again.parameters().items():
        assert torch.equal(tensor, tuned.parameters()[name])


def test_matrices_are_in_the_type_of_the_base(tmp_path: Path) -> None:
    engine = engine_of("qwen2", torch.bfloat16)
    adapter = fresh_adapter(engine.base, "both", [LoRAConfig(rank=2), IA3Config()], 0)
    assert types(adapter) == {torch.float32}
    lora, ia3 = adapter.in_type(torch.bfloat16).parts
    assert {t.dtype for _, t in lora.parameters()} == {torch.bfloat16}
    assert {t.dtype for _, t in ia3.parameters()} == {torch.float32}
    assert types(adapter.in_type(torch.float64)) == {torch.float64}
    write_adapter(adapter, tmp_path)
    read = read_adapter(tmp_path, "both", engine.base, torch.bfloat16, CPU)
    assert [{t.dtype for _, t in part.parameters()} for part in read.parts] == [
        {torch.bfloat16}, {torch.float32},
    ]  # fmt: skip


def test_at_one_place_each_has_its_own_type() -> None:
    """A LoRA and a bias, both of one part, beside the same linear."""
    engine = engine_of("qwen2", torch.bfloat16)
    config = LoRAConfig(rank=2, targets=("q_proj",), bias="lora_only")
    adapter = fresh_adapter(engine.base, "mine", config, 0).in_type(torch.bfloat16)
    found = {name.rpartition(".")[2]: tensor.dtype for name, tensor in adapter.parameters().items()}
    assert found == {"lora_A": torch.bfloat16, "lora_B": torch.bfloat16, "bias": torch.float32}


def test_a_published_version_is_no_view_of_what_trains() -> None:
    engine = engine_of("llama", torch.float32)
    training = TrainingConfig(learning_rate=1e-2, batch_size=2, max_steps=3, warmup_ratio=0.0)
    job = engine.finetune(make_examples("versions", 6), "mine", IA3Config(), training)
    first = engine.adapters.weights("mine")
    before = {name: tensor.clone() for name, tensor in first.parameters().items()}
    job.result()
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.parameters().items())
    after = engine.adapters.weights("mine").parameters()
    assert all(not torch.equal(after[name], before[name]) for name in before)
