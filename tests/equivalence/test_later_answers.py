"""A base whose linears are all computed elsewhere, siblings in one call: the same answers and training."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from coserve import LoRAConfig, SavePolicy
from coserve.adapters.methods.ia3 import IA3Config
from later import send_elsewhere
from mixed import TRAINED, TRAINING, everything, make_engine
from models import Exact

# By architecture: an adapter that changes what one of several siblings is given, and the siblings of a layer.
CHANGED = {"llama": ("k_proj", "gate_proj"), "gpt2": ("c_attn",), "mixtral": ("q_proj",)}
QKV = ("q_proj", "k_proj", "v_proj")
SIBLINGS = {"llama": [QKV, ("gate_proj", "up_proj")], "gpt2": [("c_attn",)], "mixtral": [QKV]}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("llama", SavePolicy.EVERYTHING),
        ("llama", SavePolicy.PRUNED),
        ("gpt2", SavePolicy.PRUNED),
        ("mixtral", SavePolicy.INPUTS),
    ],
)
def test_answers_that_come_later_are_the_same(name: str, keep: SavePolicy) -> None:
    changed = CHANGED[name]
    configs = {
        **TRAINED,
        "dora": LoRAConfig(rank=3, dora=True),
        "ia3 at inputs": IA3Config(targets=changed, feedforward=changed),
    }
    training = replace(TRAINING, keep=keep)
    with Exact():
        wanted = everything(make_engine(name, torch.float64), configs, training)
        engine = make_engine(name, torch.float64)
        place = send_elsewhere(engine.executor.worker.base)
        found = everything(engine, configs, training)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        assert torch.allclose(found[key].double(), numbers.double(), rtol=1e-7, atol=1e-9), key
    asked = Counter((d, tuple(path.rpartition(".")[2] for path in paths)) for d, paths in place.calls)
    for siblings in SIBLINGS[name]:
        rest = tuple(path for path in siblings if path not in changed)
        for group in (siblings, rest) if rest else (siblings,):
            assert asked["forward", group], f"{group} was not asked in one call"
        assert asked["backward", siblings] or asked["backward", rest]
