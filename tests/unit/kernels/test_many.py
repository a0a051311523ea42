"""Ways to multiply rows of many adapters, forward and backward, against their plain twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import many, reference
from coserve.kernels.blocksparse import BlockSparse
from coserve.kernels.dispatch import Approach, choose, make_way
from coserve.kernels.layout import Layout

INSIDE, OUTSIDE = 11, 7
CPU = torch.device("cpu")
WAYS = [Approach.GROUPED, Approach.BLOCK_SPARSE]


def drawn(layout: Layout, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, y, a, b and a gradient for what comes out."""
    draws = torch.Generator().manual_seed(seed)
    sizes = [(rows, INSIDE), (rows, OUTSIDE), (layout.total_ranks, INSIDE), (layout.total_ranks, OUTSIDE)]
    return [torch.randn(*size, generator=draws, dtype=dtype) for size in (*sizes, (rows, OUTSIDE))]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Segments in any order of adapters, some with several, some adapters and rows without any; and rows."""
    ranks = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=5))
    segments, row = [], draw(st.integers(0, 2))
    for length in draw(st.lists(st.integers(1, 40), max_size=6)):
        segments.append((slice(row, row + length), draw(st.integers(0, len(ranks) - 1))))
        row += length + draw(st.sampled_from([0, 0, 3]))
    return Layout.of(segments, ranks), row + draw(st.integers(0, 2)) + 1


@pytest.mark.parametrize("approach", WAYS)
@settings(max_examples=60, deadline=None)
@given(case=layouts(), seed=st.integers(0, 2**31))
def test_products_and_gradients_are_those_of_the_twin(
    approach: Approach, case: tuple[Layout, int], seed: int
) -> None:
    layout, rows = case
    x, y, a, b, grad = drawn(layout, rows, seed)
    way = make_way(layout, rows, CPU, approach)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, y, a, b)]
    out = many.add(*leaves, way)
    wanted = reference.multi_lora(x, y, a, b, layout)
    in_place = y.clone()
    many.add_(x, in_place, a, b, way)
    for got in (out, in_place):
        assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11)
    found = torch.autograd.grad(out, leaves, grad)
    of_x, of_a, of_b = reference.multi_lora_backward(grad, x, a, b, layout)
    for name, got, expected in zip("xyab", found, (of_x, grad, of_a, of_b), strict=True):
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11), f"the gradient of {name}"


def test_the_twin_s_gradients_are_autograd_s() -> None:
    """What every way is compared with is itself the derivative of what it says it is."""
    layout = Layout.of([(slice(0, 2), 1), (slice(3, 9), 0), (slice(9, 10), 1)], [3, 5, 2])
    x, y, a, b, grad = drawn(layout, 12, 5)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    out = reference.multi_lora(leaves[0], y, *leaves[1:], layout)
    found = torch.autograd.grad(out, leaves, grad)
    for got, wanted in zip(found, reference.multi_lora_backward(grad, x, a, b, layout), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("approach", WAYS)
def test_only_what_is_asked_for_has_a_gradient(approach: Approach) -> None:
    layout = Layout.of([(slice(0, 4), 0), (slice(4, 7), 1)], [2, 3])
    x, y, a, b, grad = drawn(layout, 7, 1)
    way = make_way(layout, 7, CPU, approach)
    wanted = reference.multi_lora_backward(grad, x, a, b, layout)
    for place, leaf in enumerate((x, a, b)):
        asked = leaf.clone().requires_grad_()
        given_ = [asked if tensor is leaf else tensor for tensor in (x, y, a, b)]
        (found,) = torch.autograd.grad(many.add(*given_, way), asked, grad)
        assert torch.allclose(found, wanted[place], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("approach", WAYS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_adapter(approach: Approach, broken: float) -> None:
    """Forward and backward; the broken one has fewer rows than another, so that its block is filled up."""
    layout = Layout.of([(slice(0, 5), 0), (slice(5, 8), 1), (slice(8, 9), 2)], [4, 4, 4])
    x, y, a, b, grad = drawn(layout, 9, 2)
    a[5], b[6] = broken, broken
    leaves = [tensor.requires_grad_() for tensor in (x, a, b)]
    way = make_way(layout, 9, CPU, approach)
    out = many.add(leaves[0], y, *leaves[1:], way)
    of_x, of_a, of_b = torch.autograd.grad(out, leaves, grad)
    others = [0, 1, 2, 3, 4, 8]
    assert out[others].isfinite().all() and of_x[others].isfinite().all(), "a neighbour is spoilt"
    assert not out[5:8].isfinite().any(), "what is broken shows"
    for gradient in (of_a, of_b):
        assert gradient[:4].isfinite().all() and gradient[8:].isfinite().all(), "a neighbour learns it"


@pytest.mark.parametrize("approach", WAYS)
def test_in_bfloat16(approach: Approach) -> None:
    """Within the type's own rounding of the exact result, with two segments of one adapter."""
    layout = Layout.of([(slice(0, 5), 1), (slice(5, 70), 0), (slice(70, 75), 1)], [16, 8])
    x, y, a, b, grad = (t.to(torch.bfloat16) for t in drawn(layout, 75, 3))
    way = make_way(layout, 75, CPU, approach)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    out = many.add(leaves[0], y, *leaves[1:], way)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    exact = [t.double() for t in (x, y, a, b, grad)]
    back = reference.multi_lora_backward(exact[4], exact[0], exact[2], exact[3], layout)
    for got, wanted in zip(found, (reference.multi_lora(*exact[:4], layout), *back), strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 1.6e-2


def test_decode_rows_are_not_filled_up_to_sixteen() -> None:
    """64 rows of 32 adapters, ranks 16 to 128: as many numbers between as there are rows by ranks."""
    ranks = [16] * 8 + [32] * 8 + [64] * 8 + [128] * 8
    layout = Layout.of([(slice(2 * i, 2 * i + 2), i) for i in range(32)], ranks)
    made = BlockSparse.of(layout, 64, CPU)
    assert made.size == 2 * sum(ranks) and len(made.classes) == 4
    ragged = Layout.of([(slice(0, 1), 0), (slice(1, 4), 1), (slice(4, 6), 2)], [1, 1, 1])
    assert BlockSparse.of(ragged, 6, CPU).size <= 3 * 3, "one-rank adapters, filled up to the longest"


def test_the_table() -> None:
    """Very long segments and single adapters one after the other, the others together."""
    short = Layout.of([(slice(2 * i, 2 * i + 2), i) for i in range(8)], [8] * 8)
    long = Layout.of([(slice(1024 * i, 1024 * i + 1024), i) for i in range(8)], [8] * 8)
    assert choose(short, CPU) is Approach.BLOCK_SPARSE
    assert choose(long, CPU) is Approach.GROUPED
    assert choose(Layout.of([(slice(0, 2), 0)], [8]), CPU) is Approach.GROUPED
    assert isinstance(make_way(short, 16, CPU), BlockSparse)
