"""Dropout masks: counted, not drawn in passing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.adapters.lowrank import LoRABypass
from coserve.kernels.dropout import Mask


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 300), rows=st.integers(1, 200), width=st.integers(1, 20), cut=st.integers(1, 60),
    p=st.floats(0.01, 0.95), key=st.text(max_size=9),
)  # fmt: skip
def test_windows_give_the_rows_of_the_whole(
    start: int, rows: int, width: int, cut: int, p: float, key: str
) -> None:
    x = torch.ones(rows, width)
    whole = Mask(p, key, start)(x)
    parts = [Mask(p, key, start + i)(x[i : i + cut]) for i in range(0, rows, cut)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_the_right_share_is_dropped_and_the_rest_scaled(p: float, seed: int) -> None:
    """100,000 draws: five standard deviations around p; what stays keeps the mean."""
    count = 100_000
    out = Mask(p, f"share/{seed}", 17)(torch.ones(count // 50, 50, dtype=torch.float64))
    dropped = float((out == 0).double().mean())
    assert abs(dropped - p) < 5 * (p * (1 - p) / count) ** 0.5
    kept = out[out != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)), rtol=1e-6)
    # Neither rows nor columns of the mask repeat.
    assert len({tuple(row) for row in out[:200].tolist()}) > 190 or p < 0.1


def test_other_keys_and_other_rows_draw_otherwise() -> None:
    x = torch.ones(64, 64)
    masks = [Mask(0.5, key, start)(x) for key, start in (("a", 0), ("b", 0), ("a", 64), ("a", 1))]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < float((one == other).double().mean()) < 0.6
    assert torch.equal(masks[0], Mask(0.5, "a", 0)(x))


def test_a_dropping_bypass_drops_its_input_both_ways() -> None:
    g = torch.Generator().manual_seed(4)
    x, y, a, b = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((9, 5), (9, 6), (2, 5), (6, 2)))
    mask = Mask(0.5, "k", 3)
    dropping = LoRABypass(a, b, 0.5).dropping(mask)
    wanted = y + 0.5 * (mask(x) @ a.T) @ b.T
    assert torch.allclose(dropping.add(x, y), wanted)
    in_place = y.clone()
    dropping.add_(x, in_place)
    assert torch.allclose(in_place, wanted)
    assert not torch.allclose(wanted, LoRABypass(a, b, 0.5).add(x, y))
