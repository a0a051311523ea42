"""Segmented gather against its plain twin, and who can harm whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.dispatch import stack_rank
from coserve.kernels.gathered import Owned, Stack
from coserve.kernels.layout import Layout

SLOTS, INSIDE, OUTSIDE = 5, 23, (17, 9)  # two linears that are given the same


def filled(
    ranks: list[int], rank: int, draws: torch.Generator, dtype: torch.dtype
) -> tuple[Stack, list[list[tuple[Tensor, Tensor, float]]]]:
    """A stack of random adapters of these ranks, and their (a, b, scale) by linear."""
    stack = Stack(SLOTS, rank, INSIDE, OUTSIDE, torch.zeros((), dtype=dtype))
    own: list[list[tuple[Tensor, Tensor, float]]] = [[] for _ in OUTSIDE]
    for slot, mine in enumerate(ranks):
        for linear, width in enumerate(OUTSIDE):
            a = torch.randn(mine, INSIDE, generator=draws, dtype=dtype)
            b = torch.randn(width, mine, generator=draws, dtype=dtype)
            own[linear].append((a, b, 0.5 + slot))
            stack.put(slot, linear, a, b, 0.5 + slot)
    return stack, own


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 8), min_size=SLOTS, max_size=SLOTS),
    slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
)
def test_each_row_gets_its_own_adapter_s_products(ranks: list[int], slots: list[int], seed: int) -> None:
    """Rows of any slots in any order, ranks below the stack's, at both linears (float64: 1e-12)."""
    draws = torch.Generator().manual_seed(seed)
    stack, own = filled(ranks, 8, draws, torch.float64)
    x = torch.randn(len(slots), INSIDE, generator=draws, dtype=torch.float64)
    owned = Owned(slots, x.device)
    layout = Layout.of([(slice(row, row + 1), slot) for row, slot in enumerate(slots)], ranks)
    h = stack.shrink(x, owned)
    for linear, width in enumerate(OUTSIDE):
        a = torch.cat([a for a, _, _ in own[linear]])
        b = torch.cat([b.t() * scale for _, b, scale in own[linear]])
        wanted = reference.multi_lora(x, x.new_zeros(len(x), width), a, b, layout)
        assert torch.allclose(stack.expand(linear, h, owned), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)], ids=str
)
def test_sums_are_taken_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Over 4,096 inputs: added up in bfloat16, a sum would stop growing at 256."""
    stack = Stack(2, 8, 4096, [16], torch.zeros((), dtype=dtype))
    a, b = torch.ones(8, 4096, dtype=dtype), torch.ones(16, 8, dtype=dtype)
    stack.put(1, 0, a, b, 1.0)
    owned = Owned([1, 1], a.device)
    x = torch.ones(2, 4096, dtype=dtype)
    assert torch.equal(stack.shrink(x, owned).double(), torch.full((2, 8), 4096.0).double())
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = stack.expand(0, stack.shrink(x, owned), owned).double()
    wanted = 8 * x.double().sum(1, keepdim=True).expand(2, 16)
    assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_adapter_and_its_row(broken: float) -> None:
    """A broken adapter spoils its rows only, and a broken row nobody else's; idle slots were never
    written."""
    draws = torch.Generator().manual_seed(1)
    stack, own = filled([4, 4, 4], 4, draws, torch.float32)
    x = torch.randn(6, INSIDE, generator=draws)
    slots = [0, 1, 2, 1, 0, 2]
    owned = Owned(slots, x.device)
    clean = stack.expand(0, stack.shrink(x, owned), owned)
    a, b, scale = own[0][1]
    stack.put(1, 0, torch.full_like(a, broken), torch.full_like(b, broken), scale)
    x[5] = broken
    got = stack.expand(0, stack.shrink(x, owned), owned)
    for row, slot in enumerate(slots):
        if slot == 1 or row == 5:
            assert not got[row].isfinite().any(), "what is broken shows"
        else:
            assert torch.equal(got[row], clean[row]), "a neighbour is spoilt"


@given(rank=st.integers(1, 2000))
def test_a_stack_s_rank_is_large_enough_and_wastes_at_most_half(rank: int) -> None:
    assert rank <= stack_rank(rank) <= max(2 * rank - 1, rank) and stack_rank(rank) <= 1.6 * rank
    assert stack_rank(stack_rank(rank)) == stack_rank(rank)
