"""LoRA in all its variants against PEFT, one adapter at a time."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from methods import SHAPES, SMALL, case_of, forward_errors, windowed_errors, with_peft
from models import Exact

CONFIGS = {
    "plain": {"target_modules": ["q_proj", "v_proj", "c_attn"]},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("variant", CONFIGS)
def test_served_logits(name: str, variant: str, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **CONFIGS[variant])
    adapted = with_peft(name, config, torch.float32, vocab_size=SMALL)
    error, difference = forward_errors(name, adapted, tmp_path)
    assert error <= 1e-5 and difference > 1e-2


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("variant", CONFIGS)
def test_windowed_gradients(name: str, variant: str, tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **CONFIGS[variant])
    with Exact():
        case = case_of(name, with_peft(name, config, torch.float64), tmp_path)
        errors = windowed_errors(case)
    print(errors)
    assert max(errors.values()) <= 1e-10
