"""Segmented gather against its plain twin, and who can harm whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.lora.dispatch import slot_rank
from coserve.kernels.lora.layout import Layout
from coserve.kernels.lora.slots import GatheredSlots, SlotTables

SLOTS, INSIDE, OUTSIDE = 5, 23, (17, 9)  # two linears that are given the same


def filled(
    ranks: list[int], rank: int, draws: torch.Generator, dtype: torch.dtype
) -> tuple[SlotTables, list[list[tuple[Tensor, Tensor, float]]]]:
    """Tables of random adapters of these ranks, and their (a, b, scale) by linear."""
    tables = SlotTables(SLOTS, rank, INSIDE, OUTSIDE, torch.zeros((), dtype=dtype), inputs_first=True)
    own: list[list[tuple[Tensor, Tensor, float]]] = [[] for _ in OUTSIDE]
    for slot, mine in enumerate(ranks):
        for linear, width in enumerate(OUTSIDE):
            a = torch.randn(mine, INSIDE, generator=draws, dtype=dtype)
            b = torch.randn(width, mine, generator=draws, dtype=dtype)
            own[linear].append((a, b, 0.5 + slot))
            tables.put(slot, linear, a, b, 0.5 + slot)
    return tables, own


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 8), min_size=SLOTS, max_size=SLOTS),
    slots=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=12),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_each_row_gets_its_own_adapter_s_products(
    ranks: list[int], slots: list[int], gap: int, seed: int
) -> None:
    """Rows of any slots in any order, between rows of nobody, ranks below the tables', at both linears
    (float64: 1e-12)."""
    draws = torch.Generator().manual_seed(seed)
    tables, own = filled(ranks, 8, draws, torch.float64)
    count = gap + (1 + gap) * len(slots)
    x = torch.randn(count, INSIDE, generator=draws, dtype=torch.float64)
    segments = [
        (slice(row, row + 1), slot) for row, slot in zip(range(gap, count, 1 + gap), slots, strict=True)
    ]
    backend, layout = GatheredSlots(segments, x.device), Layout.of(segments, ranks)
    h = backend.shrink(x, tables.weights(0))
    for linear, width in enumerate(OUTSIDE):
        a = torch.cat([a for a, _, _ in own[linear]])
        b = torch.cat([b.t() * scale for _, b, scale in own[linear]])
        y = torch.randn(count, width, generator=draws, dtype=torch.float64)
        wanted = reference.multi_lora(x, y, a, b, layout)
        backend.expand_(h, tables.weights(linear), y)
        assert torch.allclose(y, wanted, rtol=1e-12, atol=1e-12)


def products(tables: SlotTables, x: Tensor, slots: list[int]) -> Tensor:
    """The term that the first linear adds to each row, given its slot."""
    backend = GatheredSlots([(slice(row, row + 1), slot) for row, slot in enumerate(slots)], x.device)
    weights = tables.weights(0)
    y = x.new_zeros(len(x), weights.up.shape[2])
    backend.expand_(backend.shrink(x, weights), weights, y)
    return y


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)], ids=str
)
def test_sums_are_taken_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """Over 4,096 inputs: added up in bfloat16, a sum would stop growing at 256."""
    tables = SlotTables(2, 8, 4096, [16], torch.zeros((), dtype=dtype), inputs_first=True)
    a, b = torch.ones(8, 4096, dtype=dtype), torch.ones(16, 8, dtype=dtype)
    tables.put(1, 0, a, b, 1.0)
    backend = GatheredSlots([(slice(0, 2), 1)], a.device)
    h = backend.shrink(torch.ones(2, 4096, dtype=dtype), tables.weights(0))
    assert torch.equal(h.double(), torch.full((2, 8), 4096.0).double())
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = products(tables, x, [1, 1]).double()
    wanted = 8 * x.double().sum(1, keepdim=True).expand(2, 16)
    assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_with_its_adapter_and_its_row(broken: float) -> None:
    """A broken adapter spoils its rows only, and a broken row nobody else's; idle slots were never
    written."""
    draws = torch.Generator().manual_seed(1)
    tables, own = filled([4, 4, 4], 4, draws, torch.float32)
    x = torch.randn(6, INSIDE, generator=draws)
    slots = [0, 1, 2, 1, 0, 2]
    clean = products(tables, x, slots)
    a, b, scale = own[0][1]
    tables.put(1, 0, torch.full_like(a, broken), torch.full_like(b, broken), scale)
    x[5] = broken
    got = products(tables, x, slots)
    for row, slot in enumerate(slots):
        if slot == 1 or row == 5:
            assert not got[row].isfinite().any(), "what is broken shows"
        else:
            assert torch.equal(got[row], clean[row]), "a neighbour is spoilt"


@given(rank=st.integers(1, 2000))
def test_a_slot_s_rank_is_large_enough_and_wastes_at_most_half(rank: int) -> None:
    assert rank <= slot_rank(rank) <= max(2 * rank - 1, rank) and slot_rank(rank) <= 1.6 * rank
    assert slot_rank(slot_rank(rank)) == slot_rank(rank)
