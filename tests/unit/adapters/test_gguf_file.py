"""An adapter as GGUF, read back: its products are PEFT's, in the order of rows that GGUF has."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from coserve.adapters.gguf_architectures import neighbours
from coserve.adapters.gguf_file import write_gguf
from coserve.errors import AdapterError, AdapterMismatch, ConfigError
from models import tiny

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def saved(folder: Path, model: PreTrainedModel, **settings: Any) -> dict[str, torch.Tensor]:
    """Saves an adapter of PEFT's with random numbers; returns what it adds to each weight."""
    config = LoraConfig(r=4, lora_alpha=6, **{"target_modules": EVERY, **settings})
    made = get_peft_model(model, config)
    deltas = {}
    for name, module in made.named_modules():
        if hasattr(module, "lora_B") and "default" in module.lora_B:
            torch.nn.init.normal_(module.lora_B["default"].weight)
            path = name.removeprefix("base_model.model.")
            deltas[path] = module.get_delta_weight("default").detach().clone()
    made.save_pretrained(folder)
    return deltas


def read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Fields, and what the adapter adds to each weight, as llama.cpp computes it."""
    reader = gguf.GGUFReader(file)
    fields = {name: own.contents() for name, own in reader.fields.items()}
    tensors = {own.name: torch.from_numpy(np.array(own.data)) for own in reader.tensors}
    names = {name.rpartition(".")[0] for name in tensors}
    found = {}
    for name in names:
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        found[name] = fields["adapter.lora.alpha"] / len(a) * (b @ a)
    return fields, found


def by_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: the i-th pair of a head is its rows 2i and 2i + 1 in GGUF, i and i + half in
    transformers."""
    found, size = torch.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                found[head * size + 2 * i + half] = rows[head * size + i + half * size // 2]
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_products_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    config, heads = (
        model.config,
        {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads},
    )
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"up_proj": 9.0}}
    wanted = saved(tmp_path / "adapter", model, **patterns)
    count = write_gguf(tmp_path / "adapter", config, tmp_path / "a.gguf")
    fields, found = read(tmp_path / "a.gguf")
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == name
    assert count == 2 * len(found) == 2 * len(wanted) > 20
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for path, delta in wanted.items():
        kind = path.rpartition(".")[2][0]
        is_turned = name == "llama" and path.endswith(("q_proj", "k_proj"))
        expected = by_pairs(delta, heads[kind]) if is_turned else delta
        own = found[table.get_name(f"{path}.weight", try_suffixes=(".weight",))]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)  # sums of four products


def test_what_gguf_has_no_place_for(tmp_path: Path) -> None:
    model = tiny("llama")
    config = model.config
    saved(tmp_path / "dora", tiny("llama"), use_dora=True)
    with pytest.raises(AdapterError, match="has something else"):
        write_gguf(tmp_path / "dora", config, tmp_path / "a.gguf")
    saved(tmp_path / "plain", model)
    with pytest.raises(AdapterError, match="adapters of mixtral are not written as GGUF, but those of llama"):
        write_gguf(tmp_path / "plain", tiny("mixtral").config, tmp_path / "a.gguf")
    with pytest.raises(AdapterMismatch):
        write_gguf(tmp_path / "plain", tiny("llama", intermediate_size=64).config, tmp_path / "a.gguf")
    saved(tmp_path / "head", tiny("llama"), target_modules=["lm_head"])
    config.tie_word_embeddings = True
    with pytest.raises(AdapterError, match="lm_head"):
        write_gguf(tmp_path / "head", config, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is written over it"):
        write_gguf(tmp_path / "plain", config, tmp_path / "there")
    assert json.loads((tmp_path / "plain" / "adapter_config.json").read_text())["r"] == 4
    assert torch.equal(neighbours(torch.arange(8), 2), torch.tensor([0, 2, 1, 3, 4, 6, 5, 7]))
