"""LoRA in all its variants against PEFT, one adapter at a time: what is served, and windowed gradients."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from coserve.adapters.files import write_adapter
from coserve.adapters.merge import merge_adapter
from methods import SHAPES, SMALL, case_of, engine_of, forward_errors, windowed_errors, with_peft
from models import Exact, logits_of, save, tiny

ATTENTION = {"gpt2": ["c_attn", "c_proj"]}
EMBEDDING = {"gpt2": "wte"}
NORM = {"gpt2": "ln_f"}
PATTERNS = {
    "rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 2, r"h\.[12]\.attn\.c_attn": 7, "v_proj": 3},
    "alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 11, r"^transformer\.h\.0\.mlp\.c_proj$": 9},
}


def fields_of(variant: str, name: str) -> dict[str, Any]:
    """What PEFT's configuration says, for the names that this model's modules have."""
    attention = ATTENTION.get(name, ["q_proj", "v_proj", "o_proj"])
    around = [EMBEDDING.get(name, "embed_tokens"), "lm_head"]
    return {
        "plain": {"target_modules": attention},
        "patterns": {"target_modules": attention, "use_rslora": True, **PATTERNS},
        "dora": {"target_modules": attention, "use_dora": True, "use_rslora": True, **PATTERNS},
        "bias all": {"target_modules": attention[:1], "bias": "all"},
        "bias lora_only": {"target_modules": attention, "bias": "lora_only", "use_dora": True},
        "lora_bias": {"target_modules": attention, "lora_bias": True},
        "around": {"target_modules": [*attention[:1], *around]},
        "dora around": {"target_modules": [*attention[:1], *around], "use_dora": True},
        "saved": {
            "target_modules": attention[:1],
            "modules_to_save": [*around, NORM.get(name, "model.norm"), ATTENTION.get(name, ["o_proj"])[-1]],
        },
    }[variant]


VARIANTS = (
    "plain", "patterns", "dora", "bias all", "bias lora_only", "lora_bias", "around", "dora around", "saved",
)  # fmt: skip


def adapted(variant: str, name: str, dtype: torch.dtype, **changes: Any) -> PeftModel:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **fields_of(variant, name))
    return with_peft(name, config, dtype, **changes)


def changes_of(variant: str, name: str) -> dict[str, Any]:
    """A model with biases, where they are what it is about."""
    return {"attention_bias": True} if "bias" in variant and name in ("llama", "gemma2") else {}


# Mixtral has no biases.
CASES = [(v, n) for v in VARIANTS for n in SHAPES if not (v.startswith("bias") and n == "mixtral")]


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_served_logits(variant: str, name: str, tmp_path: Path) -> None:
    changes = changes_of(variant, name)
    oracle = adapted(variant, name, torch.float32, vocab_size=SMALL, **changes)
    error, difference = forward_errors(name, oracle, tmp_path, **changes)
    print("forward", variant, name, error, difference)
    assert error <= 1e-5 and difference > 1e-2


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_windowed_gradients(variant: str, name: str, tmp_path: Path) -> None:
    changes = changes_of(variant, name)
    with Exact():
        case = case_of(name, adapted(variant, name, torch.float64, **changes), tmp_path, **changes)
        errors = windowed_errors(case)
    print("gradient", variant, name, max(errors.values()))
    assert max(errors.values()) <= 1e-10
