"""IA3 against PEFT, one adapter at a time: what is served, gradients, files both ways, merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coserve.adapters.merge import merge_adapter
from methods import SHAPES, SMALL, case_of, engine_of, forward_errors, served, windowed_errors, with_peft
from models import Exact, logits_of, save, tiny
from rounding import allowed, both_ways, error

# Beside what is usual, linears that are as wide as they are long on either side: shapes alone tell nothing.
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["k_proj", "v_proj", "q_proj", "o_proj", "down_proj"],
              "feedforward_modules": ["o_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "attn.c_proj", "mlp.c_proj"],
             "feedforward_modules": ["mlp.c_proj"]},
    "mixtral": {"target_modules": ["k_proj", "v_proj", "o_proj"], "feedforward_modules": []},
    "gemma2": {"target_modules": r".*\.(q_proj|v_proj|o_proj|down_proj)",
               "feedforward_modules": r".*\.(o_proj|down_proj)"},
}  # fmt: skip
PROMPT = [5, 9, 2, 14, 3, 3, 18]


def adapted(name: str, dtype: torch.dtype, **changes: Any) -> PeftModel:
    return with_peft(name, IA3Config(task_type="CAUSAL_LM", **TARGETS[name]), dtype, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_served_logits(name: str, tmp_path: Path) -> None:
    error, difference = forward_errors(name, adapted(name, torch.float32, vocab_size=SMALL), tmp_path)
    assert error <= 1 and difference > 1e-2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, tmp_path: Path) -> None:
    errors = windowed_errors(case_of(name, adapted(name, torch.float32), tmp_path, dtype=torch.float32))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SHAPES)
def test_windowed_gradients(name: str, tmp_path: Path) -> None:
    with Exact():
        errors = windowed_errors(case_of(name, adapted(name, torch.float64), tmp_path))
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_modules_that_train_whole(name: str, tmp_path: Path) -> None:
    """A linear, a norm of each layer, and (untied) the head, beside what is scaled."""
    whole = (
        ["layers.1.self_attn.q_proj", "post_attention_layernorm", "lm_head"] if name == "llama" else ["ln_2"]
    )
    fields = {"target_modules": ["k_proj", "c_attn"], "feedforward_modules": [], "modules_to_save": whole}
    config = IA3Config(task_type="CAUSAL_LM", **fields)
    theirs = with_peft(name, config, torch.float32, vocab_size=SMALL)
    error, difference = forward_errors(name, theirs, tmp_path / "served")
    assert error <= 1 and difference > 1e-2
    engine = engine_of(name, vocab_size=SMALL)
    engine.load_adapter("mine", tmp_path / "served")
    engine.save_adapter("mine", tmp_path / "mine")
    again = PeftModel.from_pretrained(tiny(name, vocab_size=SMALL), str(tmp_path / "mine")).eval()
    assert float((logits_of(again, PROMPT) - logits_of(theirs, PROMPT)).abs().max()) <= 1e-5
    with Exact():
        case = case_of(name, with_peft(name, config, torch.float64), tmp_path / "trained")
        errors = windowed_errors(case)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("name", SHAPES)
def test_peft_reads_what_is_written(name: str, tmp_path: Path) -> None:
    theirs = adapted(name, torch.float32, vocab_size=SMALL)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    engine = engine_of(name, vocab_size=SMALL)
    engine.load_adapter("mine", tmp_path / "theirs")
    engine.save_adapter("mine", tmp_path / "mine")
    before, after = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "mine"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    again = PeftModel.from_pretrained(tiny(name, vocab_size=SMALL), str(tmp_path / "mine")).eval()
    assert float((logits_of(again, PROMPT) - logits_of(theirs, PROMPT)).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merged_weights_give_what_is_served(name: str, tmp_path: Path) -> None:
    theirs = adapted(name, torch.float32, vocab_size=SMALL)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    base = save(tiny(name, vocab_size=SMALL), tmp_path / "base")
    out = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    engine = engine_of(name, vocab_size=SMALL)
    engine.load_adapter("mine", tmp_path / "adapter")
    merged = logits_of(AutoModelForCausalLM.from_pretrained(out).eval(), PROMPT)[:-1].log_softmax(-1)
    single, exact = both_ways(theirs, lambda it: logits_of(it, PROMPT)[:-1].log_softmax(-1))
    for found in (merged, served(engine, PROMPT, "mine")):
        assert error(found, exact) <= allowed(single, exact)
    assert error(served(engine, PROMPT, None), exact) > 1e-2
