"""Low-rank bypasses of many adapters at a linear, against one after the other and torch's autograd."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.lora.backend import LoraSegment
from coserve.kernels.lora.dispatch import Approach
from coserve.kernels.lora.segments import LoraBackends, LoraSegments

INSIDE, OUTSIDE = 11, 7


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[LoraSegment], int]:
    """Segments of which neighbours are often alike, with rows between them that are nobody's; and rows."""
    draws = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    made: list[LoraSegment] = []
    row = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 4))):
        rank, length = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 5, 16]))
        scale, is_added = draw(st.sampled_from([1.0, 0.3])), draw(st.booleans())
        for _ in range(draw(st.integers(1, 3))):
            a, b = (
                torch.randn(*size, generator=draws, dtype=torch.float64)
                for size in ((rank, INSIDE), (OUTSIDE, rank))
            )
            made.append(LoraSegment(row, row + length, a, b, scale, is_added))
            row += length + draw(st.sampled_from([0, 0, 0, 2]))
    return made, row + draw(st.integers(0, 2))


def one_by_one(segments: Sequence[LoraSegment], x: Tensor, y: Tensor) -> Tensor:
    """In a graph."""
    parts, row = [], 0
    for s in segments:
        parts.append(y[row : s.start])
        own = slice(s.start, s.stop)
        parts.append(reference.lora(x[own], y[own], s.a, s.b, s.scale))
        row = s.stop
    return torch.cat([*parts, y[row:]])


@settings(max_examples=80, deadline=None)
@given(layouts(), st.integers(0, 2**31))
def test_products_and_gradients_are_those_of_one_by_one(
    case: tuple[list[LoraSegment], int], seed: int
) -> None:
    segments, rows = case
    draws = torch.Generator().manual_seed(seed)
    x, into = (torch.randn(rows, INSIDE, generator=draws, dtype=torch.float64) for _ in range(2))
    y, grad = (torch.randn(rows, OUTSIDE, generator=draws, dtype=torch.float64) for _ in range(2))
    for tensor in (x, *(t for s in segments for t in (s.a, s.b))):
        tensor.requires_grad_()
    wanted = torch.autograd.grad(
        one_by_one(segments, x, y), [x, *(s.a for s in segments), *(s.b for s in segments)], grad
    )
    together, found = LoraSegments(segments, LoraBackends()), y.clone()
    with torch.no_grad():
        together.add_(x, found)
        expected = one_by_one([s for s in segments if not s.is_added], x, y)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
        assert together.is_added == all(s.is_added for s in segments)
        of_x = into.clone()
        of_a, of_b = together.backward(grad, x, of_x)
        again = together.backward(grad, x, None)
    assert torch.allclose(of_x - into, wanted[0], rtol=1e-12, atol=1e-11)
    for got, expected in zip((*of_a, *of_b), wanted[1:], strict=True):
        assert got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    assert all(
        torch.equal(one, other) for one, other in zip((*of_a, *of_b), (*again[0], *again[1]), strict=True)
    )


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_adapter(broken: float) -> None:
    """Forward and back, in a batched product."""
    draws = torch.Generator().manual_seed(0)
    matrices = [
        (torch.randn(2, INSIDE, generator=draws), torch.randn(OUTSIDE, 2, generator=draws)) for _ in "abc"
    ]
    matrices[1][0][0, 0], matrices[1][1][0, 0] = broken, broken
    together = LoraSegments(
        [LoraSegment(4 * i, 4 * i + 4, a, b, 1.0) for i, (a, b) in enumerate(matrices)], LoraBackends()
    )
    x, y, into = (torch.randn(12, width, generator=draws) for width in (INSIDE, OUTSIDE, INSIDE))
    grad = torch.randn(12, OUTSIDE, generator=draws)
    together.add_(x, y)
    of_a, of_b = together.backward(grad, x, into)
    for tensor in (y, into):
        assert not tensor[4:8].isfinite().all() and tensor[[0, 1, 2, 3, 8, 9, 10, 11]].isfinite().all()
    for i in (0, 2):
        assert of_a[i].isfinite().all() and of_b[i].isfinite().all()


@pytest.mark.parametrize("approach", [Approach.GROUPED, Approach.BLOCK_SPARSE])
def test_an_approach_that_is_asked_for_is_taken(approach: Approach) -> None:
    x, a, b = torch.ones(2, INSIDE), torch.ones(1, INSIDE), torch.ones(OUTSIDE, 1)
    segments = [LoraSegment(i, i + 1, a, b, 0.5 + i) for i in range(2)]
    backends, y = LoraBackends(approach), torch.zeros(2, OUTSIDE)
    LoraSegments(segments, backends).add_(x, y)
    assert torch.equal(y, torch.tensor([5.5, 16.5])[:, None].expand(2, OUTSIDE))
    names = {Approach.GROUPED: "Grouped", Approach.BLOCK_SPARSE: "BlockSparse"}
    assert type(backends.of(segments, x.device)).__name__ == names[approach]
    assert backends.of(segments, x.device) is backends.of(list(segments), x.device), (
        "the next linear shares it"
    )
