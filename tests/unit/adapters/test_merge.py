"""Merging against PEFT's `merge_and_unload`, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coserve import LoRAConfig, SamplingParams
from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import write_adapter
from coserve.adapters.merge import WholeModel, merge_adapter
from coserve.adapters.methods import method_of
from coserve.adapters.methods.ia3 import IA3Config
from coserve.errors import AdapterError, AdapterMismatch, ModelNotFound
from methods import engine_of
from models import edit_config, logits_of, save, tiny, with_lora

PROMPT = [5, 9, 2, 40, 33]


def folders(model: PreTrainedModel, root: Path, **lora: object) -> tuple[Path, Path, PreTrainedModel]:
    """(model, adapter, what PEFT merges them into)."""
    base = save(model, root / "base")
    adapted = with_lora(model, 3, **lora)
    adapted.save_pretrained(str(root / "adapter"))
    return base, root / "adapter", adapted.merge_and_unload()


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {}),
        ("gpt2", {}),  # its linears are transposed
        ("qwen3", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "up_proj"]}),
    ],
)
def test_equals_peft(name: str, lora: dict[str, object], tmp_path: Path) -> None:
    base, adapter, merged = folders(tiny(name), tmp_path, **lora)
    out = merge_adapter(base, adapter, tmp_path / "out")
    mine, theirs = loaded(out).state_dict(), merged.state_dict()
    before = loaded(base).state_dict()
    assert mine.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert torch.allclose(mine[key], weight, rtol=0, atol=1e-6), key
    assert any(not torch.equal(mine[key], before[key]) for key in mine)
    assert torch.allclose(logits_of(loaded(out), PROMPT), logits_of(merged, PROMPT), atol=1e-4)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_modes_of_any_others_of_the_user(mask: int, tmp_path: Path) -> None:
    base, adapter, _ = folders(tiny("llama"), tmp_path, target_modules=["q_proj"])
    (base / "tokenizer.json").chmod(0o400)
    before = os.umask(mask)
    try:
        out = merge_adapter(base, adapter, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in out.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_low_precision_is_rounded_once(tmp_path: Path) -> None:
    """The nearest bfloat16 to the exact sum, whatever the size of the steps."""
    base, adapter, _ = folders(tiny("llama", torch.bfloat16), tmp_path)
    exact = with_lora(tiny("llama", torch.bfloat16).double(), 3).merge_and_unload().state_dict()
    mine = loaded(merge_adapter(base, adapter, tmp_path / "out")).state_dict()
    for key, weight in mine.items():
        assert weight.dtype == torch.bfloat16
        if "proj" in key:  # PEFT's file holds the adapter in float32 (or bfloat16, as trained)
            error = (weight.double() - exact[key]).abs()
            assert bool((error <= exact[key].abs() * 2**-8 + 1e-2 * 2**-8).all()), key


def test_what_is_refused(tmp_path: Path) -> None:
    base, adapter, _ = folders(tiny("llama"), tmp_path, target_modules=["q_proj"])
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        merge_adapter(tmp_path / "adapter", adapter, tmp_path / "a")
    other = save(tiny("llama", hidden_size=32), tmp_path / "other")
    with pytest.raises(AdapterMismatch, match="q_proj"):
        merge_adapter(other, adapter, tmp_path / "b")
    with pytest.raises(AdapterError, match="not empty"):
        merge_adapter(base, adapter, base)
    edit_config(adapter, use_qalora=True)
    with pytest.raises(AdapterError, match="use_qalora"):
        merge_adapter(base, adapter, tmp_path / "c")
    assert not any((tmp_path / name).exists() for name in "abc")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "q_proj has no bias in this model"),
        ({"target_modules": ["lm_head"]}, "shares its weight"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "shares its weight"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "shares its weight"),
    ],
)
def test_what_the_model_has_no_room_for(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    base = save(tiny("gemma2"), tmp_path / "base")
    with_lora(tiny("gemma2"), 3, **fields).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(AdapterError, match=said):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out")


def test_scaled_inputs_are_those_of_every_other_part(tmp_path: Path) -> None:
    """IA3 at what a linear is given comes before a LoRA at what it gives, whichever is listed first."""
    base = save(tiny("llama"), tmp_path / "base")
    frame = WholeModel(tiny("llama"))
    draws = torch.Generator().manual_seed(5)
    configs = [IA3Config(), LoRAConfig(rank=2, targets=("k_proj", "down_proj"))]
    for number, order in enumerate((configs, configs[::-1])):
        parts = tuple(method_of(config).fresh(config, frame, draws) for config in order)
        adapter = AdapterVersion("mine", 0, parts)
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=draws) for n, t in adapter.parameters().items()}
        folder = tmp_path / f"adapter-{number}"
        write_adapter(adapter.with_parameters(moved), folder)
        merged = loaded(merge_adapter(base, folder, tmp_path / f"out-{number}"))
        engine = engine_of("llama")
        engine.adapters.load("mine", folder)
        tokens = [5, 9, 2, 40, 33, 7]
        scored = engine.generate(tokens, "mine", SamplingParams(max_tokens=1, prompt_logprobs=1)).result()
        wanted = logits_of(merged, tokens).log_softmax(-1)
        for row, (token, found) in enumerate(zip(tokens[1:], scored.prompt_logprobs, strict=True)):
            assert found.chosen == pytest.approx(float(wanted[row, token]), abs=1e-5)
