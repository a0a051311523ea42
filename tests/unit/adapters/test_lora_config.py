"""What a LoRA configuration may say and what it means."""

import math
from typing import Any

import pytest
import torch

from coserve.adapters.methods.lora import LoRABypass, LoRAConfig
from coserve.errors import AdapterError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 0}, "at least 1, not 0"),
        ({"rank": -3}, "not -3"),
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
    assert LoRAConfig(rank=4, alpha=6.0).scale(4) == 1.5
    assert LoRAConfig(rank=4, alpha=6.0).scale(2) == 3.0
    assert LoRAConfig(rank=4, alpha=6.0, rslora=True).scale(4) == 3.0


def test_targets_match_whole_names() -> None:
    config = LoRAConfig(targets=("q_proj", "layers.1.mlp.up_proj"))
    assert config.matches("model.layers.0.self_attn.q_proj")
    assert config.matches("model.layers.1.mlp.up_proj")
    assert not config.matches("model.layers.11.mlp.up_proj")
    assert not config.matches("model.layers.0.self_attn.kq_proj")
    assert LoRAConfig().matches("anything")


def test_fresh_matrices_change_nothing_yet() -> None:
    config = LoRAConfig(rank=3)
    bypass = LoRABypass.fresh(20, 30, config, torch.Generator().manual_seed(1))
    assert bypass.a.shape == (3, 20) and bypass.b.shape == (30, 3)
    assert not bypass.b.any()
    # Kaiming uniform with a = sqrt(5) is uniform within 1 / sqrt(inputs).
    assert 0.8 * 20**-0.5 < float(bypass.a.abs().max()) <= 20**-0.5
    again = LoRABypass.fresh(20, 30, config, torch.Generator().manual_seed(1))
    assert torch.equal(bypass.a, again.a)
