"""Tiles of queries against the plain twin, and their bits against what else is in them."""

import pytest
import torch
from torch import Tensor

from coserve.kernels import reference
from coserve.kernels.aligned import QUERIES, attend_tile, reach, tile_bias
from coserve.kernels.attention import AttentionSpec, causal_mask

HEADS, GROUPS, DK, DV = 6, 2, 16, 12
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def tensors(start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v of a tile, and sinks."""
    g = torch.Generator().manual_seed(start)
    shapes = ((HEADS, QUERIES, DK), (GROUPS, reach(start), DK), (GROUPS, reach(start), DV), (HEADS,))
    q, k, v, sinks = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return q, k, v, sinks


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("start", [0, 16, 48, 112, 640])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_a_tile_is_causal_attention(start: int, window: int | None, kind: str, dtype: torch.dtype) -> None:
    q, k, v, sinks = tensors(start, dtype)
    spec = AttentionSpec(0.3, window, 2.0 if kind == "softcap" else None, sinks if kind == "sinks" else None)
    got = attend_tile(q, k, v, tile_bias(start, window, q.device), spec)
    end = start + QUERIES
    allowed = causal_mask(QUERIES, end, window, q.device)
    exact = [t.double()[None] for t in (q, k[:, :end], v[:, :end])]
    want = reference.attention(*exact, 0.3, allowed, spec.softcap, spec.sinks)[0]
    assert got.dtype == dtype and got.shape == (HEADS, QUERIES, DV)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("start", [0, 64, 1008])
def test_neither_other_queries_nor_hidden_keys_change_a_bit(start: int, dtype: torch.dtype) -> None:
    """A row of a prompt, alone as in decode: neighbours are zeros, and what follows is not there yet."""
    q, k, v, _ = tensors(start, dtype)
    spec = AttentionSpec(0.3)
    bias = tile_bias(start, None, q.device)
    together = attend_tile(q, k, v, bias, spec)
    for row in (0, 1, 7, QUERIES - 1):
        alone, keys, values = torch.zeros_like(q), k.clone(), v.clone()
        alone[:, row] = q[:, row]
        keys[:, start + row + 1 :], values[:, start + row + 1 :] = 0, 0
        assert torch.equal(attend_tile(alone, keys, values, bias, spec)[:, row], together[:, row])


def test_reach_covers_the_tile_and_grows_in_steps() -> None:
    for start in range(0, 4096, QUERIES):
        assert start + QUERIES <= reach(start) < start + QUERIES + 64 and reach(start) % 64 == 0
