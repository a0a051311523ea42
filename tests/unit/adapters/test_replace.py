"""Modules of an adapter's own: fresh ones change nothing, norms of every kind, and what cannot be one."""

import pytest
import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses, Place
from coserve.adapters.merge import WholeModel
from coserve.adapters.replace import NormReplacement, Replacement, fresh_replacements
from coserve.adapters.sites import Kind, gain_of
from coserve.errors import AdapterError
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
