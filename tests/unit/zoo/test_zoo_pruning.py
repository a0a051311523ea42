"""Structured pruning: a layer without some units is the layer in which these units write nothing."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coserve.adapters.sites import Kind
from coserve.errors import ConfigError, UnsupportedModel
from coserve.zoo.alternatives import Criterion
from coserve.zoo.layered import LayeredModel
from coserve.zoo.pruning import Units, check_share, importances, most_important, pruned, units_of
from models import make_eager, tiny

TOKENS = torch.tensor([[5, 17, 33, 8, 60, 2, 41], [9, 9, 30, 1, 77, 4, 12]])


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        ("llama", {}, {Kind.ATTENTION: [1]}),
        ("llama", {}, {Kind.FEED_FORWARD: [0, 3, 95]}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {Kind.ATTENTION: [0], Kind.FEED_FORWARD: [7]}),
        ("llama", {"num_key_value_heads": 4}, {Kind.ATTENTION: [0, 2, 3]}),
        ("llama", {"num_key_value_heads": 1}, {Kind.ATTENTION: [1, 3]}),
        ("qwen3", {}, {Kind.ATTENTION: [0], Kind.FEED_FORWARD: [1, 2]}),
        ("gemma2", {}, {Kind.ATTENTION: [1], Kind.FEED_FORWARD: [5, 6]}),
        ("starcoder2", {}, {Kind.ATTENTION: [1], Kind.FEED_FORWARD: [5, 6]}),
    ],
)
def test_pruned_units_write_nothing(name: str, changes: dict[str, Any], kept: dict[Kind, list[int]]) -> None:
    model = LayeredModel(tiny(name, **changes))
    silent = copy.deepcopy(model.layers[1])
    for kind, units in kept.items():
        path = {Kind.ATTENTION: "self_attn", Kind.FEED_FORWARD: "mlp"}[kind]
        found = units_of(model.layers[1], kind)
        gone = [unit for unit in range(len(found)) if unit not in units]
        output = silent.get_submodule(f"{path}.{found.output}")
        output.weight[:, found.columns[gone].flatten()] = 0.0
    smaller = pruned(model.layers[1], kept)
    count = [sum(p.numel() for p in layer.parameters()) for layer in (smaller, silent)]
    assert count[0] < count[1]
    with torch.no_grad():
        whole = model.logits(TOKENS)
        with model.swapped({1: silent}):
            expected = model.logits(TOKENS)
        with model.swapped({1: smaller}):
            found_logits = model.logits(TOKENS)
    torch.testing.assert_close(found_logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, whole, atol=1e-2)
    assert torch.equal(model.logits(TOKENS), whole), "the model's own layer is as it was"


def test_heads_that_share_one_key_know_how_many_they_are() -> None:
    model = LayeredModel(tiny("llama", num_key_value_heads=1))
    smaller = {1: pruned(model.layers[1], {Kind.ATTENTION: [1, 3]})}
    with torch.no_grad(), model.swapped(smaller):
        expected = model.logits(TOKENS)
        make_eager(model.model)  # repeats keys by that number
        torch.testing.assert_close(model.logits(TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_all_units_are_the_layer() -> None:
    model = LayeredModel(tiny("llama"))
    kept = {kind: range(len(units_of(model.layers[0], kind))) for kind in (Kind.ATTENTION, Kind.FEED_FORWARD)}
    assert [len(own) for own in kept.values()] == [2, 96]
    with torch.no_grad():
        whole = model.logits(TOKENS)
        with model.swapped({0: pruned(model.layers[0], kept)}):
            assert torch.equal(model.logits(TOKENS), whole)


def test_what_is_not_pruned_is_shared() -> None:
    layer = LayeredModel(tiny("llama")).layers[0]
    smaller = pruned(layer, {Kind.FEED_FORWARD: [1]})
    assert smaller.self_attn.q_proj.weight is layer.self_attn.q_proj.weight
    assert smaller.mlp.up_proj.weight.shape == (1, 64) and layer.mlp.up_proj.weight.shape == (96, 64)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", Kind.ATTENTION), ("gpt2", Kind.FEED_FORWARD), ("gpt_neox", Kind.ATTENTION),
        ("phi3", Kind.ATTENTION), ("phi3", Kind.FEED_FORWARD), ("opt", Kind.ATTENTION),
        ("opt", Kind.FEED_FORWARD), ("mixtral", Kind.FEED_FORWARD), ("gpt_oss", Kind.FEED_FORWARD),
        ("deepseek_v3", Kind.ATTENTION), ("deepseek_v3", Kind.FEED_FORWARD),
    ],
)  # fmt: skip
def test_other_forms_are_refused(name: str, kind: Kind) -> None:
    layers = LayeredModel(tiny(name)).layers
    with pytest.raises(UnsupportedModel, match="cannot be pruned: it needs"):
        units_of(layers[-1], kind)


def test_importances_are_those_of_a_plain_computation() -> None:
    model = LayeredModel(tiny("llama"))
    places = [(0, Kind.ATTENTION), (2, Kind.FEED_FORWARD)]
    found = importances(model, places, Criterion.TAYLOR, TOKENS)
    plain = tiny("llama")
    for tokens in TOKENS:
        logits = plain(input_ids=tokens[None]).logits[0]
        F.cross_entropy(logits[:-1], tokens[1:]).backward()
    layers = plain.model.layers
    assert set(found[0, Kind.ATTENTION]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for (layer, kind), scores in found.items():
        sublayer = layers[layer].self_attn if kind is Kind.ATTENTION else layers[layer].mlp
        for name, own in scores.items():
            weight = sublayer.get_submodule(name).weight
            torch.testing.assert_close(own, (weight * weight.grad).abs().detach(), atol=1e-6, rtol=1e-4)
    assert not any(p.requires_grad for p in model.model.parameters())
    by_size = importances(model, places[:1], Criterion.MAGNITUDE, TOKENS)
    weight = model.layers[0].self_attn.v_proj.weight
    assert torch.equal(by_size[0, Kind.ATTENTION]["v_proj"], weight**2)


def test_the_most_important_units_are_kept() -> None:
    units = Units({"up": torch.arange(6).reshape(3, 2)}, "down", torch.tensor([[0, 1], [2, 3], [4, 5]]))
    scores: dict[str, Tensor] = {"up": torch.zeros(6, 4), "down": torch.zeros(4, 6)}
    scores["up"][5, 2], scores["down"][1, 0] = 3.0, 2.0  # units 2 and 0
    assert most_important(scores, units, 0.34) == (0, 2)
    assert most_important(scores, units, 0.99) == (2,)
    assert most_important(scores, units, 0.01) == (0, 1, 2)
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            check_share(share)


def test_a_linear_that_is_not_plain_is_no_neuron() -> None:
    class Odd(nn.Linear):
        pass

    layer = LayeredModel(tiny("llama")).layers[0]
    layer.mlp.up_proj = Odd(64, 96)
    with pytest.raises(UnsupportedModel):
        units_of(layer, Kind.FEED_FORWARD)
