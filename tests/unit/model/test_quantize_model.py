"""Quantized models: weights that are quantized, weights that stay, and refused ones."""

import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from coserve import EngineConfig
from coserve.adapters.files import read_adapter
from coserve.errors import AdapterMismatch, ConfigError, UnsupportedModel
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.placement import PackedPlacement, PlainPlacement
from coserve.model.quantized import library
from coserve.model.quantized.embedding import QuantizedEmbedding
from coserve.model.quantized.int8 import Int8Placement
from coserve.model.quantized.nf4 import NF4Placement
from models import tiny


def kinds(base: Base) -> dict[str, type]:
    return {path: type(linear.placement) for path, linear in base.linears.items()}


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_layers_get_what_is_asked_for_and_the_rest_eight_bits(bits: str) -> None:
    base = load_base(tiny("llama"), quantize=bits)
    wanted = NF4Placement if bits == "4bit" else Int8Placement
    for path, kind in kinds(base).items():
        # 96 inputs are no whole number of blocks.
        inside = path.startswith("model.layers") and not path.endswith("down_proj")
        assert issubclass(kind, wanted if inside else Int8Placement), path
    assert isinstance(base.model.get_input_embeddings(), QuantizedEmbedding)
    assert all(p.ndim == 1 for p in base.model.parameters()), "a matrix is left"
    assert base.dtype == torch.float32 and base.quantized == bits
    assert base.parameters == load_base(tiny("llama")).parameters


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes(bits: str, tied: bool) -> None:
    """Every tensor counted here; what is tied is there once."""
    model = tiny("llama", torch.bfloat16, hidden_size=128, intermediate_size=128, tie_word_embeddings=tied)
    inside = [m for p, m in model.named_modules() if type(m) is nn.Linear and "layers" in p]
    linears, rows = sum(m.weight.numel() for m in inside), sum(m.out_features for m in inside)
    norms = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    buffers = sum(b.nbytes for b in model.buffers())
    ends = (1 if tied else 2) * 96 * (128 + 2)
    layers = linears + 2 * rows if bits == "8bit" else linears * 17 // 32
    base = load_base(model, quantize=bits)
    assert base.nbytes == layers + ends + norms + buffers
    assert base.backward_nbytes == 0
    if tied:
        assert base.linears["lm_head"].placement is base.model.get_input_embeddings().placement


def test_scaled_embeddings_are_quantized_with_their_scale() -> None:
    model = tiny("gemma3_text", torch.bfloat16)
    tokens = torch.arange(20)[None]
    wanted = model.get_input_embeddings()(tokens).detach().float()
    base = load_base(model, quantize="8bit")
    got = base.model.get_input_embeddings()(tokens).float()
    assert isinstance(base.model.get_input_embeddings(), QuantizedEmbedding)
    assert float((got - wanted).norm() / wanted.norm()) < 0.01


def test_an_embedding_that_does_more_stays_and_so_does_its_head() -> None:
    class Shifted(nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + 1

    model = tiny("llama", tie_word_embeddings=True)
    shifted = Shifted(96, 64).requires_grad_(False)
    model.set_input_embeddings(shifted)
    model.lm_head.weight = shifted.weight
    base = load_base(model, quantize="8bit")
    assert base.model.get_input_embeddings() is shifted
    assert kinds(base)["lm_head"] is PlainPlacement
    assert kinds(base)["model.layers.0.mlp.up_proj"] is Int8Placement


def test_small_gates_and_fused_experts_stay(caplog: pytest.LogCaptureFixture) -> None:
    class Gated(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.gate = inner, nn.Linear(64, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * torch.sigmoid(self.gate(x))

    model = tiny("llama", torch.bfloat16)
    model.model.layers[1].mlp = Gated(model.model.layers[1].mlp).to(torch.bfloat16)
    kind = kinds(load_base(model, quantize="4bit"))["model.layers.1.mlp.gate"]
    assert kind in (PackedPlacement, PlainPlacement)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        base = load_base(tiny("mixtral"), quantize="4bit")
    assert "fused experts are not quantized" in caplog.text
    assert any(p.ndim == 3 for p in base.model.parameters())


def test_the_kind_of_weights_is_part_of_the_fingerprint() -> None:
    prints = {bits: load_base(tiny("llama"), quantize=bits).fingerprint for bits in ("none", "8bit", "4bit")}
    assert len(set(prints.values())) == 3


def test_models_that_are_quantized_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModel, match=r"saved quantized \(gptq, 4 bits\).*engine.quantize"):
        load_base(model)
    model.config.quantization_config = None
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"saved quantized \(hqq, 4 bits\)"):
        load_base(tmp_path)


def test_four_bits_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    library.bitsandbytes.cache_clear()
    monkeypatch.setattr(library.importlib, "import_module", gone)
    with pytest.raises(ConfigError, match=r"4bit.*pip install 'coserve\[quantized\]'"):
        load_base(tiny("llama"), quantize="4bit")
    assert load_base(tiny("llama"), quantize="8bit").quantized == "8bit"
    library.bitsandbytes.cache_clear()


def test_the_library_fetches_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would, where a package of that name is installed; afterwards that package is there as before."""
    import sys

    fetcher = object()
    monkeypatch.setitem(sys.modules, "kernels", fetcher)
    with library._without_downloads(), pytest.raises(ImportError):
        import kernels  # noqa: F401
    assert sys.modules["kernels"] is fetcher


def test_only_known_kinds() -> None:
    with pytest.raises(ConfigError, match=r"engine.quantize must be none, 8bit or 4bit, not '2bit'"):
        EngineConfig(quantize="2bit")


def test_an_adapter_file_may_hold_a_copy_of_what_is_quantized_here(tmp_path: Path) -> None:
    """PEFT saves embeddings along with what stands beside them: dense ones, of which these were made."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "lm_head"])
    get_peft_model(tiny("llama"), config).save_pretrained(str(tmp_path), save_embedding_layers=True)
    base = load_base(tiny("llama"), quantize="4bit")
    read_adapter(tmp_path, "mine", base, base.dtype, base.device)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in saved if name.endswith("embed_tokens.base_layer.weight"))
    saved[name][5, 5] += 1.0
    save_file(saved, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterMismatch, match="not the base's own"):
        read_adapter(tmp_path, "mine", base, base.dtype, base.device)
