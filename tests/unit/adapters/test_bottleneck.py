"""Bottlenecks: their sites, their initial values, and refused settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Dense, Part, Side
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.methods.bottleneck import Bottleneck, BottleneckBypass, BottleneckConfig
from coserve.adapters.settings import settings_of
from coserve.adapters.sites import Kind
from coserve.errors import AdapterError, AdapterMismatch
from coserve.model.load import load_base
from models import edit_config, tiny

FRAME = WholeModel(tiny("llama"))
DOWN0 = "base_model.model.model.layers.0.mlp.bottleneck_down"


def fresh(config: BottleneckConfig, name: str = "llama") -> Part:
    return Bottleneck().fresh(config, WholeModel(tiny(name)), torch.Generator().manual_seed(2))


def read(folder: Path) -> AdapterVersion:
    return read_adapter(folder, "mine", FRAME, torch.float32, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = BottleneckConfig(5, "pfeiffer", "silu")
    write_adapter(AdapterVersion("a", 0, (fresh(config),)), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "layout", "endings"),
    [
        ("llama", "houlsby", {"self_attn", "mlp"}),
        ("llama", "pfeiffer", {"mlp"}),
        ("gpt2", "houlsby", {"attn", "mlp"}),
        ("gemma2", "houlsby", {"self_attn", "mlp"}),
        ("mixtral", "pfeiffer", {"mlp"}),
    ],
)
def test_layouts(name: str, layout: Any, endings: set[str]) -> None:
    paths = [place.path for place in fresh(BottleneckConfig(4, layout), name).bypasses]
    assert {path.rpartition(".")[2] for path in paths} == endings and len(paths) == 3 * len(endings)


def test_a_sublayer_that_is_no_module_is_refused_by_name() -> None:
    """OPT's feed-forward network is two linears of its layer."""
    for layout in ("houlsby", "pfeiffer"):
        with pytest.raises(AdapterMismatch, match=r"each layer's feed-forward, and in this model's layer 0"):
            fresh(BottleneckConfig(4, layout), "opt")


def test_sublayers_are_as_wide_as_their_layers() -> None:
    """Embeddings may be narrower."""
    sites = load_base(tiny("opt", word_embed_proj_dim=32)).sites.values()
    assert {site.outputs for site in sites if site.kind is Kind.ATTENTION} == {64}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"width": 0}, "1 to 65536, not 0"),
        ({"width": 10**18}, "1 to 65536"),
        ({"width": 2.5}, "whole width"),
        ({"width": True}, "whole width"),
        ({"layout": "parallel"}, "houlsby or pfeiffer, not 'parallel'"),
        ({"activation": "tanh"}, "relu or gelu or silu, not 'tanh'"),
    ],
)
def test_out_of_range(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        BottleneckConfig(**fields)


def test_settings_from_plain_fields() -> None:
    fields = {"type": "bottleneck", "width": 8, "layout": "pfeiffer", "activation": "gelu"}
    assert settings_of(fields) == (BottleneckConfig(8, "pfeiffer", "gelu"),)


def test_a_fresh_one_changes_nothing_and_learns() -> None:
    found = fresh(BottleneckConfig(5)).bypasses.values()
    bypasses = [bypass for bypass in found if isinstance(bypass, BottleneckBypass)]
    assert len(bypasses) == len(found) == 6
    y = torch.randn(3, 64)
    for bypass in bypasses:
        assert torch.equal(bypass.add(y, y), y)
        assert 0.8 / 8 < float(bypass.down.abs().max()) <= 1 / 8
    assert not torch.equal(bypasses[0].down, bypasses[1].down)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_in_place_is_the_same(activation: Any) -> None:
    draws = torch.Generator().manual_seed(3)
    shapes: tuple[tuple[int, ...], ...] = ((4, 16), (4,), (16, 4), (16,))
    down, down_bias, up, up_bias = (torch.randn(shape, generator=draws) for shape in shapes)
    bypass = BottleneckBypass(down, down_bias, up, up_bias, activation)
    rows = torch.randn(9, 16, generator=draws)
    given = torch.zeros(9, 16)  # what another bypass made the rows of
    wanted = bypass.add(given, rows)
    for y in (rows.clone(), torch.cat([rows, rows])[9:]):  # also rows of a larger batch
        bypass.add_(given, y)
        assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert float((wanted - rows).abs().max()) > 0.1


def test_it_cannot_be_merged() -> None:
    (bypass, *_) = fresh(BottleneckConfig(5)).bypasses.values()
    with pytest.raises(AdapterError, match="cannot be written into"):
        bypass.merged(Dense(torch.zeros(64, 64), None), Side.OUTPUT)


def test_what_is_written_is_read_again(folder: Path) -> None:
    part = read(folder).parts[0]
    assert part.config == BottleneckConfig(5, "pfeiffer", "silu")
    wanted = dict(fresh(BottleneckConfig(5, "pfeiffer", "silu")).parameters())
    found = dict(part.parameters())
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in found)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("width", 6, "bottleneck_down.weight is (5, 64), not (6, 64)"),
        ("width", "5", "width must be of type int"),
        ("activation", "tanh", "relu or gelu or silu"),
        ("layout", ["pfeiffer"], "layout must be of type str"),
        ("dropout", 0.1, "dropout=0.1 is not supported"),
    ],
)
def test_fields_that_are_refused(folder: Path, field: str, value: object, said: str) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises(AdapterError) as error:
        read(folder)
    assert said in str(error.value)


def test_tensors_that_are_missing(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if n != f"{DOWN0}.bias"}, file)
    with pytest.raises(AdapterMismatch, match=rf"{DOWN0}\.bias is missing"):
        read(folder)
    save_file({n: t for n, t in whole.items() if ".layers.0." not in n}, file)
    with pytest.raises(AdapterMismatch, match=r"layers\.0\.mlp\..* and 1 more are missing"):
        read(folder)
    save_file({**whole, f"{DOWN0}.scale": torch.ones(1)}, file)
    with pytest.raises(AdapterMismatch, match=r"bottleneck_down\.scale' \(1,\) would go unused"):
        read(folder)


def test_a_place_that_is_no_sublayer(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    moved = {name.replace("layers.0.mlp", "layers.0.mlp.up_proj"): t for name, t in load_file(file).items()}
    save_file(moved, file)
    targets = [f"model.layers.{layer}.mlp{'.up_proj' * (not layer)}" for layer in range(3)]
    edit_config(folder, target_modules=targets)
    with pytest.raises(AdapterMismatch, match="no such attention or feed-forward"):
        read(folder)
