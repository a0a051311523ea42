"""Methods that PEFT has, against it, one adapter at a time: what is served, gradients, files both ways, and
merged weights. (LoRA's and those of virtual tokens are in files of their own.)"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coserve import TrainingConfig
from coserve.adapters.merge import merge_adapter
from coserve.adapters.methods.ia3 import IA3Config as OwnIA3Config
from coserve.adapters.methods.ln_tuning import LNTuningConfig as OwnLNTuningConfig
from methods import SHAPES, SMALL, case_of, engine_of, forward_errors, served, windowed_errors, with_peft
from mixed import make_examples
from models import Exact, logits_of, save, tiny
from rounding import allowed, both_ways, error

# Beside what is usual, linears that are as wide as they are long on either side: shapes alone tell nothing.
SCALED: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["k_proj", "v_proj", "q_proj", "o_proj", "down_proj"],
              "feedforward_modules": ["o_proj", "down_proj"]},
    "gpt2": {"target_modules": ["c_attn", "attn.c_proj", "mlp.c_proj"],
             "feedforward_modules": ["mlp.c_proj"]},
    "mixtral": {"target_modules": ["k_proj", "v_proj", "o_proj"], "feedforward_modules": []},
    "gemma2": {"target_modules": r".*\.(q_proj|v_proj|o_proj|down_proj)",
               "feedforward_modules": r".*\.(o_proj|down_proj)"},
}  # fmt: skip
NORMS = {
    "llama": ["input_layernorm", "norm"], "gpt2": ["ln_1", "ln_2", "ln_f"], "mixtral": ["norm"],
    "gemma2": ["pre_feedforward_layernorm", "post_feedforward_layernorm", "model.norm"],
}  # fmt: skip
CONFIGS: dict[str, Callable[[str], PeftConfig]] = {
    "ia3": lambda name: IA3Config(task_type="CAUSAL_LM", **SCALED[name]),
    "ln_tuning": lambda name: LNTuningConfig(task_type="CAUSAL_LM", target_modules=NORMS[name]),
}
CASES = [(method, name) for method in CONFIGS for name in SHAPES]
PROMPT = [5, 9, 2, 14, 3, 3, 18]


def adapted(method: str, name: str, dtype: torch.dtype, **changes: Any) -> PeftModel:
    return with_peft(name, CONFIGS[method](name), dtype, **changes)


@pytest.mark.sample(2, per="method")
@pytest.mark.parametrize(("method", "name"), CASES)
def test_served_logits(method: str, name: str, tmp_path: Path) -> None:
    oracle = adapted(method, name, torch.float32, vocab_size=SMALL)
    error, difference = forward_errors(name, oracle, tmp_path)
    assert error <= 1 and difference > 1e-2


@pytest.mark.sample(2)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_gradients(method: str, name: str, tmp_path: Path) -> None:
    case = case_of(name, adapted(method, name, torch.float32), tmp_path, dtype=torch.float32)
    errors = windowed_errors(case)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.sample(1, per="method")
@pytest.mark.parametrize(("method", "name"), CASES)
def test_windowed_gradients(method: str, name: str, tmp_path: Path) -> None:
    with Exact():
        errors = windowed_errors(case_of(name, adapted(method, name, torch.float64), tmp_path))
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
    engine.adapters.load("mine", tmp_path / "served")
    engine.adapters.save("mine", tmp_path / "mine")
    again = PeftModel.from_pretrained(tiny(name, vocab_size=SMALL), str(tmp_path / "mine")).eval()
    assert float((logits_of(again, PROMPT) - logits_of(theirs, PROMPT)).abs().max()) <= 1e-5
    with Exact():
        case = case_of(name, with_peft(name, config, torch.float64), tmp_path / "trained")
        errors = windowed_errors(case)
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.sample(2, per="method")
@pytest.mark.parametrize(("method", "name"), CASES)
def test_peft_reads_what_is_written(method: str, name: str, tmp_path: Path) -> None:
    theirs = adapted(method, name, torch.float32, vocab_size=SMALL)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    engine = engine_of(name, vocab_size=SMALL)
    engine.adapters.load("mine", tmp_path / "theirs")
    engine.adapters.save("mine", tmp_path / "mine")
    before, after = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("theirs", "mine"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    again = PeftModel.from_pretrained(tiny(name, vocab_size=SMALL), str(tmp_path / "mine")).eval()
    assert float((logits_of(again, PROMPT) - logits_of(theirs, PROMPT)).abs().max()) <= 1e-5


@pytest.mark.sample(1, per="method")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("method", CONFIGS)
def test_merged_weights_give_what_is_served(method: str, name: str, tmp_path: Path) -> None:
    theirs = adapted(method, name, torch.float32, vocab_size=SMALL)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    base = save(tiny(name, vocab_size=SMALL), tmp_path / "base")
    out = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    engine = engine_of(name, vocab_size=SMALL)
    engine.adapters.load("mine", tmp_path / "adapter")
    merged = logits_of(AutoModelForCausalLM.from_pretrained(out).eval(), PROMPT)[:-1].log_softmax(-1)
    single, exact = both_ways(theirs, lambda it: logits_of(it, PROMPT)[:-1].log_softmax(-1))
    for found in (merged, served(engine, PROMPT, "mine")):
        assert error(found, exact) <= allowed(single, exact)
    assert error(served(engine, PROMPT, None), exact) > 1e-2


# What a server's own settings give, in coserve's words.
OURS: dict[str, Any] = {
    "ia3": OwnIA3Config(),
    "ln_tuning": OwnLNTuningConfig(modules_to_save=("layers.1.self_attn.o_proj",)),
}


@pytest.mark.parametrize("method", OURS)
def test_peft_loads_what_was_trained_here(method: str, tmp_path: Path) -> None:
    """A fresh adapter changes nothing; after some steps it does, and PEFT's logits are the served ones."""
    engine = engine_of("llama", vocab_size=SMALL)
    base = served(engine, PROMPT, None)
    training = TrainingConfig(
        learning_rate=3e-2, batch_size=2, max_steps=4, warmup_ratio=0.0, weight_decay=0.0
    )
    job = engine.finetune(make_examples("here"), "mine", OURS[method], training)
    fresh = float((served(engine, PROMPT, "mine@0") - base).abs().max())
    job.result().save(tmp_path)
    ours = served(engine, PROMPT, "mine")
    assert fresh <= 1e-5 and float((ours - base).abs().max()) > 1e-2
    theirs = PeftModel.from_pretrained(tiny("llama", vocab_size=SMALL), str(tmp_path)).eval()
    single, exact = both_ways(theirs, lambda it: logits_of(it, PROMPT)[:-1].log_softmax(-1))
    assert error(ours, exact) <= allowed(single, exact)
