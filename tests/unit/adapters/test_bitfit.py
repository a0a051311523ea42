"""BitFit: the biases that it trains, and refused settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Dense, Part, Side
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.bitfit import BitFit, BitFitBypass, BitFitConfig
from coserve.adapters.settings import settings_of
from coserve.adapters.sites import Kind
from coserve.errors import AdapterError, AdapterMismatch
from models import tiny

FRAMES = {name: WholeModel(tiny(name)) for name in ("llama", "gpt2", "qwen2", "qwen3")}


def fresh(name: str, config: BitFitConfig = BitFitConfig()) -> Part:
    return BitFit().fresh(config, FRAMES[name], torch.Generator())


def paths(part: Part) -> set[str]:
    return {place.path for place in part.bypasses}


def test_all_biases_of_the_base() -> None:
    model = tiny("gpt2")
    wanted = {n.removesuffix(".bias"): p for n, p in model.named_parameters() if n.endswith(".bias")}
    part = fresh("gpt2")
    assert paths(part) == wanted.keys() and "transformer.ln_f" in wanted
    for place, bypass in part.bypasses.items():
        assert isinstance(bypass, BitFitBypass)
        assert torch.equal(bypass.bias, wanted[place.path])
        assert bypass.base is not None and bypass.bias.data_ptr() != bypass.base.data_ptr()
    assert paths(fresh("qwen2")) == {f"model.layers.{i}.self_attn.{n}_proj" for i in range(3) for n in "qkv"}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_base_without_any_gets_new_ones_in_its_layers(name: str) -> None:
    sites = FRAMES[name].sites.values()
    wanted = {s.path for s in sites if s.kind in (Kind.LINEAR, Kind.NORM) and 0 <= s.stage < 3}
    part = fresh(name)
    assert paths(part) == wanted and len(wanted) == 3 * (9 if name == "llama" else 11)
    for bypass in part.bypasses.values():
        assert isinstance(bypass, BitFitBypass)
        assert bypass.base is None and not bypass.bias.any()


def test_all_are_the_new_and_the_old() -> None:
    part = fresh("qwen2", BitFitConfig("all"))
    assert len(paths(part)) == 3 * 9
    assert sum(b.base is not None for b in part.bypasses.values() if isinstance(b, BitFitBypass)) == 9
    assert paths(fresh("gpt2", BitFitConfig("all"))) == paths(fresh("gpt2"))


def test_targets_choose() -> None:
    wanted = {f"model.layers.{i}.{n}" for i in range(3) for n in ("self_attn.q_proj", "mlp.up_proj")}
    for biases in ("auto", "all"):
        assert paths(fresh("qwen2", BitFitConfig(biases, ("q_proj", "up_proj")))) == wanted
    with pytest.raises(AdapterMismatch, match=r"layers\.0\.mlp\.up_proj has none"):
        fresh("qwen2", BitFitConfig("existing", ("q_proj", "up_proj")))
    with pytest.raises(AdapterMismatch, match="this model has none"):
        fresh("llama", BitFitConfig("existing"))
    with pytest.raises(AdapterMismatch, match="no linear or norm of the model is called"):
        fresh("llama", BitFitConfig(targets=("embed_tokens",)))


@pytest.mark.parametrize(
    ("fields", "said"), [({"biases": "none"}, "not 'none'"), ({"targets": "q_proj"}, "several names")]
)
def test_out_of_range(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        BitFitConfig(**fields)


def test_settings_from_plain_fields() -> None:
    fields = {"type": "bitfit", "biases": "existing", "target_modules": ["q_proj"]}
    assert settings_of(fields) == (BitFitConfig("existing", ("q_proj",)),)


@pytest.mark.parametrize("base", [None, torch.tensor([1.0, -2.0, 3.0])])
def test_in_place_is_the_same(base: torch.Tensor | None) -> None:
    bypass = BitFitBypass(torch.tensor([0.5, 0.25, -1.0]), base)
    for y in (torch.randn(4, 3), torch.randn(4, 2, 3)):  # also the heads of a row
        wanted = y + (bypass.bias if base is None else bypass.bias - base)
        assert torch.equal(bypass.add(y, y), wanted)
        bypass.add_(y, y)
        assert torch.equal(y, wanted)


def test_merged_weights() -> None:
    """On top of what another part of the adapter has made of the bias."""
    bypass = BitFitBypass(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 1.0]))
    weight = torch.randn(2, 3)
    merged = bypass.merged(Dense(weight, torch.tensor([10.0, 10.0])), Side.OUTPUT)
    assert torch.equal(merged.weight, weight)
    assert merged.bias is not None and merged.bias.tolist() == [9.5, 11.0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    part = fresh("gpt2")
    moved = {name: tensor + 1 for name, tensor in part.parameters()}
    write_adapter(AdapterVersion("a", 0, (part.with_parameters(moved),)), tmp_path)
    return tmp_path


def read(folder: Path) -> AdapterVersion:
    return read_adapter(folder, "mine", FRAMES["gpt2"], torch.float32, torch.device("cpu"))


def test_what_is_written_is_read_again(folder: Path) -> None:
    (part,) = read(folder).parts
    assert paths(part) == paths(fresh("gpt2"))
    for bypass in part.bypasses.values():
        assert isinstance(bypass, BitFitBypass) and bypass.base is not None
        assert torch.equal(bypass.bias, bypass.base + 1)


def test_what_does_not_fit_is_named(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    name = "base_model.model.transformer.ln_f.bias"
    for spoilt, said in (
        ({**whole, name: torch.zeros(63)}, r"transformer.ln_f: the base's norm is 64 -> 64, but .* \(63,\)"),
        ({n: t for n, t in whole.items() if n != name}, r"transformer\.ln_f\.bias is missing"),
        ({**whole, "base_model.model.transformer.wpe.bias": torch.zeros(64)}, r"wpe\.bias.* would go unused"),
        ({**whole, "base_model.model.transformer.ln_f.weight": torch.zeros(64)}, "would go unused"),
    ):
        save_file(spoilt, file)
        with pytest.raises(AdapterMismatch, match=said):
            read(folder)
