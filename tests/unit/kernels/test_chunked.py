"""Attention over chunks of keys equals attention over all of them at once."""

import secrets
from itertools import pairwise
from random import Random

import pytest
import torch

from coserve.kernels import reference
from coserve.kernels.attention import AttentionSpec, causal_mask
from coserve.kernels.chunked import ChunkedAttention

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("scores", [1 << 22, 40])
def test_chunks_in_any_order_give_plain_attention(
    dtype: torch.dtype, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped queries, sliding windows, soft caps, sinks and large scores, whatever the chunks are."""
    monkeypatch.setattr("coserve.kernels.chunked._SCORES", scores)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draws, _ = Random(seed), torch.manual_seed(seed)
    for _ in range(40):
        groups, share = draws.choice([(1, 1), (2, 1), (2, 3)])
        rows, length = draws.randint(1, 9), draws.randint(0, 40)
        length += rows
        q = torch.randn(groups * share, rows, 8, dtype=dtype) * draws.choice((1, 6))
        k, v = torch.randn(groups, length, 8, dtype=dtype), torch.randn(groups, length, 5, dtype=dtype)
        sinks = draws.choice((None, torch.randn(groups * share, dtype=dtype)))
        window, softcap = draws.choice((None, 1, 3, 12, 100)), draws.choice((None, 2.0))
        spec = AttentionSpec(0.3, window, softcap, sinks)
        it = ChunkedAttention(q, length - rows, groups, 5, spec)
        cuts = sorted({0, length, *(draws.randint(0, length) for _ in range(4))})
        chunks = list(pairwise(cuts))
        draws.shuffle(chunks)
        for low, high in chunks:
            it.add(k[:, low:high], v[:, low:high], low)
        allowed = causal_mask(rows, length, window, q.device)
        plain = reference.attention(q[None], k[None], v[None], 0.3, allowed, softcap, sinks)[0]
        found = it.result()
        assert found.shape == plain.shape and found.dtype == dtype
        assert (found - plain).abs().max() <= BOUNDS[dtype]
