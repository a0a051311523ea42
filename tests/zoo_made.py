"""Models and adapters for a zoo, in folders, and the digests that tell folders apart."""

import copy
import hashlib
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import save, tiny, with_lora

LAYERS = 2


def make_model(folder: Path, seed: int = 0, name: str = "llama", **changes: Any) -> Path:
    """A model of two layers with a tokenizer."""
    return save(tiny(name, seed=seed, **{"num_hidden_layers": LAYERS, **changes}), folder)


def make_lora(
    folder: Path, model: Path, targets: Iterable[str] = ("q_proj", "v_proj"), seed: int = 1
) -> Path:
    """A LoRA beside linears of the model in a folder."""
    base = AutoModelForCausalLM.from_pretrained(model)
    with_lora(base, seed, target_modules=list(targets)).save_pretrained(folder)
    return folder


@torch.no_grad()
def make_fine_tune(folder: Path, model: Path, strengths: dict[str, float], seed: int = 1) -> Path:
    """A model whose parameters differ from those of another, by the given share of their own size, where
    their names contain one of the keys."""
    tuned: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        for part, strength in strengths.items():
            if part in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((strength * parameter.std().nan_to_num(1.0) * noise).to(parameter.dtype))
    tuned.save_pretrained(folder)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    return folder


def mixed_layers(
    tuned: PreTrainedModel, base: PreTrainedModel, places: Collection[int]
) -> dict[int, nn.Module]:
    """Decoder layers of a llama, by number from 0, that have another's attention or feed-forward, with its
    norm, where the place of that component is one of `places`."""
    halves = (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm"))
    layers: dict[int, nn.Module] = {}
    for number, layer in enumerate(tuned.model.layers):
        layers[number] = mixed = copy.copy(layer)
        mixed._modules = dict(layer._modules)
        for place, names in enumerate(halves, 1 + 2 * number):
            for name in names if place in places else ():
                setattr(mixed, name, getattr(base.model.layers[number], name))
    return layers


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of all files, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
