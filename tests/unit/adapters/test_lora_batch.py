"""The low-rank adapters of a step: what they add together at a linear, in place and in a graph."""

import pytest
import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lora_batch import AdapterRows, LoraBatch
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.methods.bitfit import BitFitBypass
from coserve.kernels import reference
from coserve.model.linear import bypassed
from coserve.model.placement import place_locally

INSIDE, OUTSIDE = 12, 9


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lora(seed: int, rank: int, **more: object) -> LoRABypass:
    return LoRABypass(drawn(seed, rank, INSIDE), drawn(seed + 1, OUTSIDE, rank), 0.3 + seed, **more)  # type: ignore[arg-type]


def step() -> list[AdapterRows]:
    """Two of one rank, one that drops out where it trains, one with a bias, one at another linear alone, and
    one that also moves a bias; rows 0, 8 and 12 belong to nobody."""
    bias = BitFitBypass(drawn(9, OUTSIDE), None)
    return [
        (slice(1, 3), Bypasses({}, {"q": lora(1, 4)})),
        (slice(3, 5), Bypasses({}, {"q": lora(3, 4), "k": bias})),
        (slice(5, 8), Bypasses({}, {"q": lora(5, 2, dropout=0.5)})),
        (slice(9, 10), Bypasses({}, {"q": lora(7, 2, bias=drawn(8, OUTSIDE))})),
        (slice(10, 12), Bypasses({}, {"k": lora(11, 3)})),
    ]


def test_a_batch_and_its_rest_are_all_that_the_adapters_add() -> None:
    batch = LoraBatch(step()[:2]).with_rows(step()[2:])
    x, y = drawn(20, 1, 13, INSIDE), drawn(21, 13, OUTSIDE)
    for path in ("q", "k"):
        wanted, got = y.clone(), y.clone()
        for rows, own in step():
            if (bypass := own.outputs.get(path)) is not None:
                wanted[rows] = bypass.add(x[0, rows], wanted[rows])
        for _ in range(2):  # the second step of the same rows
            got = y.clone()
            batch.add_(path, x, got)
        for rows, own in batch.rest:
            if path in own.outputs:
                own.outputs[path].add_(x[0, rows], got[rows])
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12), path
    assert [list(own.outputs) for _, own in batch.rest] == [["k"], ["q"]]
    assert batch.with_rows([]) is batch and not batch.is_empty and LoraBatch(()).is_empty
    assert batch.segments("o") is None


@pytest.mark.parametrize(
    ("is_kept", "added"),
    [
        (False, (False, False, False)),
        (True, (False, False, False)),
        (True, (True, True, True)),
        (True, (False, True, False)),
    ],
)
def test_a_linear_in_a_graph_has_the_gradients_of_plain_torch(is_kept: bool, added: tuple[bool, ...]) -> None:
    """Also where its product, with some of the bypasses, has been kept."""
    placement = place_locally(weight := drawn(30, OUTSIDE, INSIDE), None)
    adapters = [(rows, own) for rows, own in step() if rows.stop <= 8]
    leaves = [t.requires_grad_() for _, own in adapters for t in (own.outputs["q"].a, own.outputs["q"].b)]  # type: ignore[attr-defined]
    x, grad = drawn(31, 1, 9, INSIDE).requires_grad_(), drawn(32, 1, 9, OUTSIDE)
    plain = [x[0] @ weight.T]
    for rows, own in adapters:
        b = own.outputs["q"]
        assert isinstance(b, LoRABypass)
        y = plain[-1]
        own_y = reference.lora(x[0, rows], y[rows], b.a, b.b, b.scale)
        plain.append(torch.cat([y[: rows.start], own_y, y[rows.stop :]]))
    kept = None
    if is_kept:
        kept = plain[0].detach().clone()
        for (rows, _), is_in in zip(adapters, added, strict=True):
            if is_in:
                kept[rows] = plain[-1][rows].detach()
        kept = kept[None]
    segments = LoraBatch(adapters).segments("q", added)
    assert segments is not None
    out = bypassed(x, placement, segments, kept)
    assert torch.allclose(out[0], plain[-1], rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(plain[-1], [x, *leaves], grad[0])
    for got, expected in zip(torch.autograd.grad(out, [x, *leaves], grad), wanted, strict=True):
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)
