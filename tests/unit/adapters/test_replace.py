"""Modules of an adapter's own: fresh ones change nothing, norms of every kind, pruned linears, and what
cannot be one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypasses, Dense, Place, Side
from coserve.adapters.files import read_adapter, read_outline, write_adapter
from coserve.adapters.merge import WholeModel
from coserve.adapters.replace import (
    NormReplacement,
    PrunedReplacement,
    Replacement,
    expect_exact,
    fresh_replacements,
)
from coserve.adapters.sites import Kind, gain_of
from coserve.errors import AdapterError, AdapterMismatch
from coserve.model.load import load_base
from models import tiny

NORMS = {"llama": "model.norm", "gemma2": "model.norm", "gpt2": "transformer.ln_f", "opt": "final_layer_norm"}


@pytest.mark.parametrize("name", NORMS)
def test_the_gain_of_a_norm_is_found_by_looking(name: str) -> None:
    model = tiny(name, torch.float64)
    path = next(p for p, _ in model.named_modules() if p.endswith(NORMS[name]))
    norm = model.get_submodule(path)
    offset = 1.0 if name == "gemma2" else 0.0
    assert torch.allclose(gain_of(norm), norm.weight.detach() + offset, rtol=1e-12)


def test_a_norm_that_does_something_else_is_refused() -> None:
    class Squaring(torch.nn.Module):
        weight = torch.linspace(1.0, 3.0, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight**2

    with pytest.raises(AdapterError, match="cannot be replaced"):
        gain_of(Squaring())


def test_a_norm_that_loses_features_is_refused() -> None:
    model = tiny("llama")
    model.model.norm.weight.data[5] = 0.0
    with pytest.raises(AdapterError, match=r"model\.norm multiplies features by zero"):
        fresh_replacements(["model.norm"], WholeModel(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_fresh_ones_give_what_the_base_gives(name: str) -> None:
    """Every linear, norm and embedding at once, in place and in a graph."""
    base = load_base(tiny(name, torch.float64))
    kinds = (Kind.LINEAR, Kind.NORM, Kind.EMBEDDING)
    paths = [path for path, site in base.sites.items() if site.kind in kinds]
    fresh = fresh_replacements(paths, base)
    assert {place.path for place in fresh} == set(paths)
    outputs = Bypasses.of(fresh.items()).outputs
    for path in paths:
        site, bypass = base.sites[path], outputs[path]
        assert isinstance(bypass, Replacement)
        assert all(t.dtype == torch.float64 for t in bypass.parameters().values())
        x = torch.randn(4, site.inputs, dtype=torch.float64)
        if site.kind is Kind.EMBEDDING:
            x = torch.tensor([3, 0, 7, 95])
        module = base.linears[path] if path in base.linears else base.model.get_submodule(path)
        wanted = module(x)
        given = wanted if site.kind is Kind.NORM else torch.full_like(wanted, float("nan"))
        bypass.add_(x, after := given.clone())
        assert torch.allclose(bypass.add(x, given), wanted) and torch.allclose(after, wanted), path


def test_a_replaced_norm_is_the_norm_with_those_weights() -> None:
    model = tiny("gemma2", torch.float64)
    bypass = fresh_replacements(["model.norm"], WholeModel(model))[Place("model.norm")]
    assert isinstance(bypass, NormReplacement)
    x = torch.randn(3, 64, dtype=torch.float64)
    given = model.model.norm(x)
    weight = torch.linspace(-1.0, 2.0, 64, dtype=torch.float64)
    after = bypass.with_parameters({"weight": weight}).add(given, given)
    model.model.norm.weight.data = weight
    assert torch.allclose(after, model.model.norm(x), rtol=1e-5)  # it computes in float32


UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
KEPT: dict[str, Any] = {UP: {"outputs": [0, 3, 95]}, DOWN: {"inputs": [1, 4]}}


def pruned_file(folder: Path, kept: Any = KEPT, **shapes: tuple[int, int]) -> Path:
    """An adapter's files with pruned linears of a llama, and its last norm."""
    folder.mkdir()
    named = {UP: shapes.get("up", (3, 64)), DOWN: shapes.get("down", (64, 2)), "model.norm": (64,)}
    fields = {
        "peft_type": "LN_TUNING", "modules_to_save": list(named), "target_modules": [], "kept_units": kept,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    tensors = {f"base_model.model.{path}.weight": torch.randn(shape) for path, shape in named.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, name: str = "llama") -> AdapterVersion:
    return read_adapter(folder, "mine", WholeModel(tiny(name)), torch.float32, torch.device("cpu"))


def test_a_pruned_linear_is_one_with_zeros(tmp_path: Path) -> None:
    version, model = read(pruned_file(tmp_path / "one")), tiny("llama")
    for path, width in ((UP, 96), (DOWN, 64)):
        bypass, linear = version.bypasses.outputs[path], model.get_submodule(path)
        assert isinstance(bypass, PrunedReplacement) and bypass.replaces
        dense = bypass.merged(Dense(linear.weight, None), Side.OUTPUT)
        assert dense.weight.shape == linear.weight.shape
        assert bypass.saved == linear.weight.numel() * 4 > 16 * bypass.weight.nbytes
        x = torch.randn(5, linear.in_features)
        expected = x @ dense.weight.T
        assert torch.allclose(bypass.instead(x), expected, atol=1e-5), path
        assert int((expected != 0).any(0).sum()) == (3 if path == UP else width)
        bypass.add_(x, after := torch.full((5, width), float("nan")))
        assert torch.allclose(after, expected, atol=1e-5)
    outline = read_outline(tmp_path / "one", "mine", WholeModel(model), torch.float32)
    assert outline.nbytes == version.nbytes == 4 * (3 * 64 + 64 * 2 + 64)
    with pytest.raises(AdapterError, match=r"mine has a surrogate .* nothing is trained"):
        expect_exact(version)
    write_adapter(version, tmp_path / "again")
    again = read(tmp_path / "again").bypasses.outputs
    for path in (UP, DOWN):
        x = torch.randn(2, model.get_submodule(path).in_features)
        assert torch.equal(again[path].instead(x), version.bypasses.outputs[path].instead(x))


@pytest.mark.parametrize(
    ("kept", "shapes", "said"),
    [
        ({**KEPT, UP: {"outputs": [0, 3]}}, {}, "not \\(2, 64\\)"),
        ({DOWN: KEPT[DOWN]}, {}, r"weight is \(3, 64\), not \(96, 64\)"),
        ({**KEPT, UP: {"outputs": [0, 3, 96]}}, {}, "from 0 to 95"),
        ({**KEPT, UP: {"outputs": [-1, 3, 5]}}, {}, "from 0 to 95"),
        ({**KEPT, UP: {"outputs": [3, 0, 5]}}, {}, "ascending"),
        ({**KEPT, UP: {"outputs": [3, 3, 5]}}, {}, "ascending"),
        ({**KEPT, UP: {"outputs": [True, 3, 5]}}, {}, "ascending"),
        ({**KEPT, UP: {"outputs": [0.0, 3, 5]}}, {}, "ascending"),
        ({**KEPT, UP: {"outputs": ["0"]}}, {}, "ascending"),
        ({**KEPT, UP: {"outputs": {"0": 1}}}, {}, "ascending"),
        ({**KEPT, UP: {"rows": [0, 3, 95]}}, {}, "outputs and inputs by module"),
        ({**KEPT, UP: [0, 3, 95]}, {}, "outputs and inputs by module"),
        ([UP], {}, "outputs and inputs by module"),
        ("all", {}, "outputs and inputs by module"),
        ({**KEPT, "model.norm": {"outputs": [1]}}, {}, "cannot be pruned"),
        ({**KEPT, "model.layers.0.mlp.up_proj": {"outputs": [1]}}, {}, "which has no tensors"),
        ({**KEPT, "nothing": {"outputs": [1]}}, {}, "which has no tensors"),
        (KEPT, {"down": (64, 96)}, r"weight is \(64, 96\), not \(64, 2\)"),
    ],
)
def test_pruned_modules_that_fit_nothing_are_refused(
    kept: Any, shapes: dict[str, tuple[int, int]], said: str, tmp_path: Path
) -> None:
    folder = pruned_file(tmp_path / "one", kept, **shapes)
    with pytest.raises((AdapterError, AdapterMismatch), match=said):
        read(folder)
    with pytest.raises((AdapterError, AdapterMismatch), match=said):
        read_outline(folder, "mine", WholeModel(tiny("llama")), torch.float32)


def test_other_methods_have_no_pruned_modules(tmp_path: Path) -> None:
    folder = pruned_file(tmp_path / "one")
    fields = json.loads((folder / "adapter_config.json").read_text())
    ia3 = {**fields, "peft_type": "IA3", "feedforward_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(ia3))
    with pytest.raises(AdapterError, match="kept_units"):
        read(folder)
