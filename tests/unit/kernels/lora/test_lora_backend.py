"""LoRA backends, forward and backward, against their plain twins."""

import secrets
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.lora import dispatch
from coserve.kernels.lora.backend import LoraWeights, TrainingLoraBackend
from coserve.kernels.lora.blocksparse import BlockSparse
from coserve.kernels.lora.dispatch import Approach, choose, make_backend
from coserve.kernels.lora.grouped import Grouped
from coserve.kernels.lora.layout import Layout

INSIDE, OUTSIDE = 11, 7
CPU = torch.device("cpu")
APPROACHES = [Approach.GROUPED, Approach.BLOCK_SPARSE]


def drawn(layout: Layout, rows: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, y, a, b and a gradient for what comes out."""
    draws = torch.Generator().manual_seed(seed)
    sizes = [(rows, INSIDE), (rows, OUTSIDE), (layout.total_ranks, INSIDE), (layout.total_ranks, OUTSIDE)]
    return [torch.randn(*size, generator=draws, dtype=dtype) for size in (*sizes, (rows, OUTSIDE))]


def by_backend(
    backend: TrainingLoraBackend, layout: Layout, x: Tensor, y: Tensor, a: Tensor, b: Tensor, grad: Tensor
) -> list[Tensor]:
    """The result, and the gradients of x, a and b; a and b are tables, as in `reference.py`."""
    spans = layout.ranks
    weights = LoraWeights([a[span] for span in spans], [b[span].t() for span in spans], [1.0] * len(spans))
    out, of_x = y.clone(), torch.zeros_like(x)
    backend.expand_(backend.shrink(x, weights), weights, out)
    of_a, of_b = backend.backward(grad, x, weights, of_x)
    again = backend.backward(grad, x, weights, None)
    for found, other in zip((*of_a, *of_b), (*again[0], *again[1]), strict=True):
        assert found.dtype == x.dtype
        torch.testing.assert_close(found, other, rtol=0, atol=0, equal_nan=True)  # whether x has one or not
    return [out, of_x, torch.cat(list(of_a)), torch.cat([found.t() for found in of_b])]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Segments in any order of adapters, some with several, some adapters and rows without any; and rows."""
    ranks = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=5))
    segments, row = [], draw(st.integers(0, 2))
    for length in draw(st.lists(st.integers(1, 40), max_size=6)):
        segments.append((slice(row, row + length), draw(st.integers(0, len(ranks) - 1))))
        row += length + draw(st.sampled_from([0, 0, 3]))
    return Layout.of(segments, ranks), row + draw(st.integers(0, 2)) + 1


@pytest.mark.parametrize("approach", APPROACHES)
@settings(max_examples=60, deadline=None)
@given(case=layouts(), seed=st.integers(0, 2**31))
def test_products_and_gradients_are_those_of_the_twin(
    approach: Approach, case: tuple[Layout, int], seed: int
) -> None:
    layout, rows = case
    x, y, a, b, grad = drawn(layout, rows, seed)
    found = by_backend(make_backend(layout, CPU, approach), layout, x, y, a, b, grad)
    wanted = (
        reference.multi_lora(x, y, a, b, layout),
        *reference.multi_lora_backward(grad, x, a, b, layout),
    )
    for name, got, expected in zip(("y", "x", "a", "b"), found, wanted, strict=True):
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11), name


def test_the_twin_s_gradients_are_autograd_s() -> None:
    """The reference's gradients are those of autograd: every backend is compared with them."""
    layout = Layout.of([(slice(0, 2), 1), (slice(3, 9), 0), (slice(9, 10), 1)], [3, 5, 2])
    x, y, a, b, grad = drawn(layout, 12, 5)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    out = reference.multi_lora(leaves[0], y, *leaves[1:], layout)
    found = torch.autograd.grad(out, leaves, grad)
    for got, wanted in zip(found, reference.multi_lora_backward(grad, x, a, b, layout), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("approach", APPROACHES)
def test_the_gradient_of_x_is_added(approach: Approach) -> None:
    """To what the base's product has given, and to no row of nobody."""
    layout = Layout.of([(slice(0, 4), 0), (slice(5, 7), 1)], [2, 3])
    x, _, a, b, grad = drawn(layout, 8, 1)
    spans = layout.ranks
    weights = LoraWeights([a[span] for span in spans], [b[span].t() for span in spans], [1.0, 1.0])
    of_x = torch.ones_like(x)
    make_backend(layout, CPU, approach).backward(grad, x, weights, of_x)
    wanted, _, _ = reference.multi_lora_backward(grad, x, a, b, layout)
    assert torch.allclose(of_x, wanted + 1, rtol=1e-12, atol=1e-12)
    assert torch.equal(of_x[[4, 7]], torch.ones_like(x[:2]))


@pytest.mark.parametrize("approach", APPROACHES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_adapter(approach: Approach, broken: float) -> None:
    """Forward and backward; the broken one has fewer rows than another, so that its block is filled up."""
    layout = Layout.of([(slice(0, 5), 0), (slice(5, 8), 1), (slice(8, 9), 2)], [4, 4, 4])
    x, y, a, b, grad = drawn(layout, 9, 2)
    a[5], b[6] = broken, broken
    backend = make_backend(layout, CPU, approach)
    out, of_x, of_a, of_b = by_backend(backend, layout, x, y, a, b, grad)
    others = [0, 1, 2, 3, 4, 8]
    assert out[others].isfinite().all() and of_x[others].isfinite().all(), "a neighbour is spoilt"
    assert not out[5:8].isfinite().any(), "what is broken shows"
    for gradient in (of_a, of_b):
        assert gradient[:4].isfinite().all() and gradient[8:].isfinite().all(), "a neighbour learns it"


@pytest.mark.parametrize("approach", APPROACHES)
def test_in_bfloat16(approach: Approach) -> None:
    """Within the type's own rounding of the exact result, with two segments of one adapter."""
    layout = Layout.of([(slice(0, 5), 1), (slice(5, 70), 0), (slice(70, 75), 1)], [16, 8])
    x, y, a, b, grad = (t.to(torch.bfloat16) for t in drawn(layout, 75, 3))
    found = by_backend(make_backend(layout, CPU, approach), layout, x, y, a, b, grad)
    exact = [t.double() for t in (x, y, a, b, grad)]
    back = reference.multi_lora_backward(exact[4], exact[0], exact[2], exact[3], layout)
    for got, wanted in zip(found, (reference.multi_lora(*exact[:4], layout), *back), strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 1.6e-2


def test_decode_rows_are_not_filled_up_to_sixteen() -> None:
    """64 rows of 32 adapters, ranks 16 to 128: as many numbers between as there are rows by ranks."""
    ranks = [16] * 8 + [32] * 8 + [64] * 8 + [128] * 8
    layout = Layout.of([(slice(2 * i, 2 * i + 2), i) for i in range(32)], ranks)
    assert between(layout, 64) == [2 * 8 * rank for rank in (16, 32, 64, 128)]
    ragged = Layout.of([(slice(0, 1), 0), (slice(1, 4), 1), (slice(4, 6), 2)], [1, 1, 1])
    assert sum(between(ragged, 6)) <= 3 * 3, "one-rank adapters, filled up to the longest"


def between(layout: Layout, rows: int) -> list[int]:
    """Numbers between the two products, by size of the blocks."""
    a = [torch.ones(span.stop - span.start, INSIDE) for span in layout.ranks]
    weights = LoraWeights(a, [torch.ones(OUTSIDE, len(own)) for own in a], [1.0] * len(a))
    backend = BlockSparse.of(layout, CPU)
    return [own.numel() for own in backend.shrink(torch.ones(rows, INSIDE), weights)]


def test_the_table() -> None:
    """Very long segments, single adapters and those of unlike ranks one after the other, others together."""
    short = Layout.of([(slice(2 * i, 2 * i + 2), i) for i in range(8)], [8] * 8)
    long = Layout.of([(slice(1024 * i, 1024 * i + 1024), i) for i in range(8)], [8] * 8)
    assert choose(short, CPU) is Approach.BLOCK_SPARSE
    assert choose(long, CPU) is Approach.GROUPED
    assert choose(Layout.of([(slice(0, 2), 0)], [8]), CPU) is Approach.GROUPED
    unlike = Layout.of([(slice(2 * i, 2 * i + 2), i) for i in range(8)], [1, 2, 3, 4, 5, 6, 7, 8])
    assert choose(unlike, CPU) is Approach.GROUPED
    assert isinstance(make_backend(short, CPU), BlockSparse)
    assert isinstance(make_backend(long, CPU), Grouped)


def test_a_gpu_groups_segments_that_are_alone_or_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(dispatch, "is_installed", lambda: True)
    decode = Layout.of([(slice(row, row + 1), row) for row in range(8)], [8] * 8)
    windows = Layout.of([(slice(0, 400), 0), (slice(400, 420), 1)], [8, 4])
    assert choose(decode, gpu) is Approach.SEGMENTED
    assert choose(windows, gpu) is Approach.GROUPED
    assert choose(Layout.of([(slice(0, 32), 0)], [8]), gpu) is Approach.GROUPED
    assert choose(Layout.of([(slice(0, 32), 0), (slice(32, 40), 1)], [8, 8]), gpu) is Approach.SEGMENTED
    monkeypatch.setattr(dispatch, "is_installed", lambda: False)
    assert choose(decode, gpu) is Approach.GROUPED


def test_segments_of_one_rank_are_apart_by_length() -> None:
    """Two adapters of each rank with rows of each length, scaled: no block has padding, and all is as the
    twin has it. An adapter that has rows of two lengths keeps its rank's blocks together."""
    lengths, ranks, scales = [3, 3, 3, 3, 6, 6, 6, 6], [2, 2, 16, 16, 2, 2, 16, 16], [0.3, 1.7] * 4
    ends = list(accumulate(lengths))
    rows = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    layout = Layout.of([(span, i) for i, span in enumerate(rows)], ranks)
    backend = BlockSparse.of(layout, CPU)
    assert [size.height for size in backend.sizes] == [3, 6, 3, 6]
    assert all(isinstance(size.lines, slice) for size in backend.sizes)
    x, y, a, b, grad = drawn(layout, ends[-1], secrets.randbits(31))
    weights = LoraWeights([a[s] for s in layout.ranks], [b[s].t() for s in layout.ranks], scales)
    out, of_x = y.clone(), torch.zeros_like(x)
    backend.expand_(backend.shrink(x, weights), weights, out)
    of_a, of_b = backend.backward(grad, x, weights, of_x)
    factors = torch.cat(
        [torch.full((rank, 1), scale, dtype=torch.float64) for rank, scale in zip(ranks, scales, strict=True)]
    )
    wanted = reference.multi_lora(x, y, a, factors * b, layout)
    wanted_x, wanted_a, wanted_b = reference.multi_lora_backward(grad, x, a, factors * b, layout)
    found = (out, of_x, torch.cat(list(of_a)), torch.cat([own.t() for own in of_b]))
    for got, expected in zip(found, (wanted, wanted_x, wanted_a, factors * wanted_b), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    contiguous = [own.is_contiguous() for own in of_b]
    assert contiguous == [rank == 16 for rank in ranks], "as the weights lie, unless that is slow"
    shared = Layout.of([(span, i % 4) for i, span in enumerate(rows)], ranks[:4])
    assert [size.height for size in BlockSparse.of(shared, CPU).sizes] == [6, 6]
