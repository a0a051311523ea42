"""LoRA configurations: accepted values and their meaning."""

import math
from typing import Any

import pytest
import torch

from coserve.adapters.bypass import Place
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.merge import WholeModel
from coserve.adapters.method import chosen
from coserve.adapters.methods.lora import LoRA, LoRAConfig
from coserve.errors import AdapterError, AdapterMismatch
from models import tiny

FRAME = WholeModel(tiny("llama"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 0}, "1 to 16384, not 0"),
        ({"rank": -3}, "not -3"),
        ({"rank": 10**18}, "1 to 16384"),
        ({"rank_pattern": {"q_proj": 10**18}}, "1 to 16384"),
        ({"rank": 1.5}, "whole rank"),
        ({"rank": "8"}, "whole rank"),
        ({"targets": "q_proj"}, "several names"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"dropout": math.nan}, "dropout"),
        ({"alpha": math.inf}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
    ],
)
def test_out_of_range(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        LoRAConfig(**fields)


def test_scale() -> None:
    assert LoRAConfig(rank=4, alpha=6.0).at(["up"]).scale("up", 4) == 1.5
    assert LoRAConfig(rank=4, alpha=6.0).at(["up"]).scale("up", 2) == 3.0
    assert LoRAConfig(rank=4, alpha=6.0, rslora=True).at(["up"]).scale("up", 4) == 3.0


def test_patterns_choose_rank_and_alpha() -> None:
    config = LoRAConfig(
        rank=4, alpha=6.0,
        rank_pattern={"q_proj": 2, r"^model\.layers\.1\.mlp\.up_proj$": 3},
        alpha_pattern={r"layers\.[01]\.self_attn\.q_proj": 8.0},
    )  # fmt: skip
    assert config.at(["model.layers.0.self_attn.q_proj"]).rank("model.layers.0.self_attn.q_proj") == 2
    assert config.at(["model.layers.0.self_attn.kq_proj"]).rank("model.layers.0.self_attn.kq_proj") == 4
    assert config.at(["model.layers.1.mlp.up_proj"]).rank("model.layers.1.mlp.up_proj") == 3
    assert config.at(["model.layers.11.mlp.up_proj"]).rank("model.layers.11.mlp.up_proj") == 4
    assert config.at(["model.layers.1.self_attn.q_proj"]).scale("model.layers.1.self_attn.q_proj", 2) == 4.0
    assert config.at(["model.layers.2.self_attn.q_proj"]).scale("model.layers.2.self_attn.q_proj", 2) == 3.0
    with pytest.raises(AdapterError, match="regular expression"):
        LoRAConfig(rank_pattern={"(": 2})
    with pytest.raises(AdapterError, match="rank"):
        LoRAConfig(rank_pattern={"q_proj": 0})


def test_targets_are_whole_names() -> None:
    def paths(*targets: str) -> set[str]:
        return set(chosen(FRAME, targets))

    assert paths("q_proj") == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    assert paths("layers.1.mlp.up_proj", "lm_head") == {"model.layers.1.mlp.up_proj", "lm_head"}
    assert len(paths()) == 7 * 3, "all in the layers"
    for nobody in ("roj", "proj", "0.mlp"):
        with pytest.raises(AdapterMismatch, match=nobody):
            paths("q_proj", nobody)


def test_fresh_matrices_change_nothing_yet() -> None:
    def fresh() -> LoRABypass:
        part = LoRA().fresh(LoRAConfig(rank=3, targets=("up_proj",)), FRAME, torch.Generator().manual_seed(1))
        bypass = part.bypasses[Place("model.layers.0.mlp.up_proj")]
        assert isinstance(bypass, LoRABypass)
        return bypass

    bypass = fresh()
    assert bypass.a.shape == (3, 64) and bypass.b.shape == (96, 3)
    assert not bypass.b.any()
    # Kaiming uniform with a = sqrt(5) is uniform within 1 / sqrt(inputs).
    assert 0.8 * 64**-0.5 < float(bypass.a.abs().max()) <= 64**-0.5
    assert torch.equal(bypass.a, fresh().a)
