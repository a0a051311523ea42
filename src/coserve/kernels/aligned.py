"""Batch-invariant attention: a query's bits depend on its position and keys alone.

Queries are computed in *tiles*: the one that starts at position `start`, a multiple of `QUERIES`, has a row
for each of the positions `start` to `start + QUERIES - 1`, zeros where there is no query, over `reach` keys.
So the query at a position is always the same row of products of the same shape, in decode, in a prompt, or
recomputed after a preemption.
"""

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec

QUERIES = 16  # of a tile; as many as a step has rows, so that decode wastes no more there than elsewhere
_KEYS = 64  # `reach` is a multiple of it: larger attends more for nothing, smaller makes more shapes


def reach(start: int) -> int:
    """Number of keys of a tile, from position 0 on; those after a query are masked."""
    return -(-(start + QUERIES) // _KEYS) * _KEYS


def tile_bias(start: int, window: int | None, device: torch.device) -> Tensor:
    """Additive mask [QUERIES, reach]: 0 where a query of the tile attends, -inf elsewhere."""
    age = torch.arange(start, start + QUERIES, device=device)[:, None] - torch.arange(
        reach(start), device=device
    )
    hidden = age < 0 if window is None else (age < 0) | (age >= window)
    return torch.zeros(hidden.shape, dtype=torch.float32, device=device).masked_fill_(hidden, float("-inf"))


def attend_tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of q [heads, QUERIES, dk] over k [groups, reach, dk] and v [groups, reach, dv], with the
    tile's bias.

    Returns [heads, QUERIES, dv]. Masked keys and values must be finite, too. Without a graph.
    """
    heads, queries, dk = q.shape
    groups, keys, _ = k.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.reshape(groups, -1, dk), k.transpose(1, 2)).to(exact).mul_(spec.scale)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap).mul_(spec.softcap)
    by_head = scores.view(heads, queries, keys).add_(bias)
    if spec.sinks is None:
        weights = by_head.softmax(-1)
    else:
        sinks = spec.sinks.to(exact).view(heads, 1, 1).expand(-1, queries, -1)
        weights = torch.cat([by_head, sinks], dim=-1).softmax(-1)[..., :-1]
    return torch.bmm(weights.to(v.dtype).reshape(groups, -1, keys), v).view(heads, queries, -1)
