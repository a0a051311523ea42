"""Every bypass beside a cut linear gives what it gives on one rank, and so do its gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Side
from coserve.adapters.dora import DoRABypass, Norms
from coserve.adapters.methods import method_of
from coserve.adapters.settings import settings_of
from coserve.adapters.sharded import AdapterShards, each_bypass
from coserve.adapters.sites import CutWeights, DenseWeights
from coserve.errors import AdapterError
from coserve.kernels.dropout import Mask
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.parallel.ranks import Pieces, join_parts, part_of
from coserve.parallel.search import Cut
from models import tiny
from threaded_ranks import ThreadRanks, on_ranks

RANKS, ROWS = 2, 5
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
CUTS = {UP: Cut.COLWISE, DOWN: Cut.ROWWISE}
BOTH = {"targets": (UP, DOWN)}
# Each with the collectives of one pass there and back, by the linear.
CASES: Mapping[str, tuple[dict[str, Any], dict[str, int]]] = {
    "lora with biases": ({"type": "lora", "lora_bias": True, "rank": 3, **BOTH}, {}),
    "lora with dropout": ({"type": "lora", "dropout": 0.4, "rank": 3, **BOTH}, {}),
    "dora": ({"type": "lora", "dora": True, "rank": 3, **BOTH}, {DOWN: 1}),
    "dora with biases": ({"type": "lora", "dora": True, "bias": "all", "dropout": 0.4, **BOTH}, {DOWN: 1}),
    "ia3": ({"type": "ia3", **BOTH, "feedforward": (DOWN,)}, {}),
    "ia3 at outputs": ({"type": "ia3", **BOTH, "feedforward": ()}, {}),
    "ia3 at inputs": ({"type": "ia3", **BOTH, "feedforward": (UP, DOWN)}, {}),
    "bitfit": ({"type": "bitfit", "biases": "all", **BOTH}, {}),
    "modules to save": ({"type": "ln_tuning", "targets": (UP, DOWN)}, {}),
    "lokr": ({"type": "lokr", "r": 3, **BOTH}, {}),
    "loha": ({"type": "loha", "rank": 2, **BOTH}, {}),
    "vera": ({"type": "vera", "r": 7, "vera_dropout": 0.1, **BOTH}, {}),
    "oft": ({"type": "oft", "block_size": 4, **BOTH}, {DOWN: 2}),
    "miss": ({"type": "miss", "r": 8, "miss_dropout": 0.1, **BOTH}, {}),
    "randlora": ({"type": "randlora", "r": 12, **BOTH}, {}),
    "hra": ({"type": "hra", "r": 2, **BOTH}, {DOWN: 2}),
    "shira": ({"type": "shira", "r": 1, **BOTH}, {}),
    "fourierft": ({"type": "fourierft", "n_frequency": 30, "scaling": 900, **BOTH}, {}),
    "vblora": ({"type": "vblora", "num_vectors": 8, "vector_length": 16, **BOTH}, {}),
    "c3a": ({"type": "c3a", "block_size": 16, **BOTH}, {}),
    "road": ({"type": "road", "group_size": 16, "variant": "road_2", **BOTH}, {UP: 2}),
}
Numbers = dict[str, Tensor]
Run = Callable[[AdapterVersion, Tensor], Tensor]


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(tiny("llama", torch.float64, num_hidden_layers=1, attention_bias=True, mlp_bias=True))


def drawn_adapter(base: Base, settings: Mapping[str, Any]) -> AdapterVersion:
    """An adapter with random weights."""
    generator = torch.Generator().manual_seed(3)
    parts = tuple(method_of(one).fresh(one, base, generator) for one in settings_of([settings]))
    adapter = AdapterVersion("drawn", 1, parts)
    return adapter.with_parameters({
        name: (t.double() + 0.3 * torch.randn(t.shape, generator=generator, dtype=torch.float64))
        for name, t in adapter.parameters().items()
    })  # fmt: skip


def dropping(bypass: Bypass, part: tuple[int, int]) -> Bypass:
    return bypass.dropping(Mask(bypass.dropout, "key", 7, part)) if bypass.dropout else bypass


@dataclass
class OwnWeights:
    """The base's frozen weights, of which bypasses find a rank's part."""

    base: Base
    ranks: ThreadRanks

    def part(self, path: str, weight: Tensor) -> Tensor:
        return part_of(weight, 0 if CUTS[path] is Cut.COLWISE else 1, self.ranks)

    def __call__(self, path: str) -> CutWeights:
        dense = self.base.frozen.dense(path)
        bias = own_bias(path, dense.bias, self.ranks)
        own = DenseWeights(replace(dense, weight=self.part(path, dense.weight), bias=bias))
        whole = DenseWeights(dense)
        return CutWeights(own, whole.row_norms, lambda: dense.bias, whole.forward)


def unchanged(x: Tensor) -> Tensor:
    return x


def own_bias(path: str, bias: Tensor | None, ranks: ThreadRanks) -> Tensor | None:
    assert bias is not None
    if CUTS[path] is Cut.COLWISE:
        return part_of(bias, 0, ranks)
    return None if ranks.number else bias


def passed(
    adapter: AdapterVersion, path: str, x: Tensor, weight: Tensor, bias: Tensor | None, part: tuple[int, int],
    complete: Callable[[Tensor], Tensor], entering: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """A linear with its bypasses, as the rows of a graph pass it."""
    bypasses = adapter.bypasses
    if (before := bypasses.inputs.get(path)) is not None:
        x = before.add(x, x)
    x = entering(x)
    y = x @ weight.t() if bias is None else x @ weight.t() + bias
    if (beside := bypasses.outputs.get(path)) is not None:
        y = dropping(beside, part).add(x, y)
    return complete(y)


def gradients(
    adapter: AdapterVersion, x: Tensor, run: Callable[[AdapterVersion, Tensor], Tensor], of_y: Tensor
) -> Numbers:
    leaves = {name: t.detach().requires_grad_() for name, t in adapter.parameters().items()}
    x = x.clone().requires_grad_()
    y = run(adapter.with_parameters(leaves), x)
    asked = {"x": x, **leaves}
    found = torch.autograd.grad(y, list(asked.values()), of_y, allow_unused=True)
    return {"y": y.detach(), **{n: g for n, g in zip(asked, found, strict=True) if g is not None}}


@pytest.mark.parametrize("path", [UP, DOWN])
@pytest.mark.parametrize("case", CASES)
def test_bypasses_of_a_cut_linear(case: str, path: str, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, sent = CASES[case]
    # Python 3.11 holds a lock over a cached property of all objects, which threads as ranks would wait for.
    monkeypatch.setattr(Norms, "values", property(vars(Norms)["values"].func))
    adapter = drawn_adapter(base, settings)
    generator = torch.Generator().manual_seed(5)
    dense, site = base.frozen.dense(path), base.sites[path]
    x = torch.randn(ROWS, site.inputs, generator=generator, dtype=torch.float64)
    of_y = torch.randn(ROWS, site.outputs, generator=generator, dtype=torch.float64)

    def alone(a: AdapterVersion, x: Tensor) -> Tensor:
        return passed(a, path, x, dense.weight, dense.bias, (0, 1), unchanged, unchanged)

    want = gradients(adapter, x, alone, of_y)

    def on_rank(ranks: ThreadRanks) -> tuple[Numbers, int]:
        is_columns = CUTS[path] is Cut.COLWISE
        shards, weights = AdapterShards(CUTS, ranks), OwnWeights(base, ranks)
        own = shards.cut(with_own_weights(adapter, weights))
        whole = shards.whole(own)
        again = whole.parameters()
        assert all(torch.equal(again[name], t) for name, t in adapter.parameters().items())
        for (_, mine_again), (_, at_first) in zip(whole.placed(), adapter.placed(), strict=True):
            if isinstance(at_first, DoRABypass):  # of whole weights, too
                assert isinstance(mine_again, DoRABypass)
                torch.testing.assert_close(mine_again.norms.values, at_first.norms.values)
        part = next(shards.dropout_part(p) for p, _ in own.placed() if p.path == path)
        ranks.calls.clear()

        def run(a: AdapterVersion, x: Tensor) -> Tensor:
            complete = unchanged if is_columns else ranks.summed
            entering = ranks.entering if is_columns else unchanged
            weight = weights.part(path, dense.weight)
            return passed(a, path, x, weight, own_bias(path, dense.bias, ranks), part, complete, entering)

        mine = (x, ranks.columns_of(of_y)) if is_columns else (ranks.columns_of(x), of_y)
        found = gradients(own, mine[0], run, mine[1])
        calls = ranks.calls.total() - 1  # of the linear's own
        with torch.no_grad():
            in_place = run(own, mine[0])
        torch.testing.assert_close(in_place, found["y"])
        shares = shards.shares(own)
        for name, share in shares.items():
            if name in found:
                grad = ranks.sum(found[name]) if share.is_sum else found[name]
                found[name] = grad if share.dim is None else ranks.whole(grad, share.dim)
        found["y"] = ranks.columns(found["y"]) if is_columns else found["y"]
        found["x"] = found["x"] if is_columns else ranks.columns(found["x"])
        return found, calls

    for found, calls in on_ranks(RANKS, on_rank):
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=name)
        assert calls == sent.get(path, 0), "collectives of the bypass"


def with_own_weights(adapter: AdapterVersion, weights: OwnWeights) -> AdapterVersion:
    """DoRA's bypasses with a rank's weights, as a rank's frame gives them."""

    def own(place: Any, bypass: Bypass) -> Bypass:
        if isinstance(bypass, DoRABypass):
            return replace(bypass, norms=Norms(weights(place.path), bypass.lora))
        return bypass

    return each_bypass(adapter, own)


def test_what_has_gradients_of_two_kinds_is_refused(base: Base) -> None:
    """A bank of vectors that a linear which is not cut shares with one that is."""
    settings = {"type": "vblora", "num_vectors": 8, "vector_length": 16, "targets": (UP, "q_proj")}
    adapter = drawn_adapter(base, settings)
    assert any(place.side is Side.OUTPUT for place, _ in adapter.placed())

    def refused(ranks: ThreadRanks) -> str:
        with pytest.raises(AdapterError) as caught:
            AdapterShards(CUTS, ranks).cut(adapter)
        return str(caught.value)

    assert all("gradients do not add up" in words for words in on_ranks(RANKS, refused))


@pytest.mark.parametrize(
    ("pieces", "first"), [((1, 1, 1), [0, 1, 4, 5, 8, 9]), ((2, 2, 8), [0, 2, 4, 5, 6, 7])]
)
def test_pieces_are_cut_each_for_itself(pieces: Pieces, first: list[int]) -> None:
    """Queries, keys and values of one linear, of one width or of several."""
    whole = torch.arange(24.0).view(2, 12)

    def own(ranks: ThreadRanks) -> Tensor:
        return part_of(whole, 1, ranks, pieces)

    parts = on_ranks(2, own)
    assert parts[0][0].tolist() == first
    assert torch.equal(join_parts(parts, 1, pieces), whole)
