"""Causal attention over keys and values that come chunk by chunk: an online softmax.

The plain twin is `reference.attention` over all keys at once.
"""

from typing import Final

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec

_SCORES: Final = 1 << 20  # of scores in memory at once, 4 MiB in float32


class ChunkedAttention:
    """Attention of queries q [heads, t, dk] at positions from `first` on, over keys of `groups` heads and
    values of width `value`. Each call of `add` has further ones; their order does not matter.

    For each query it has the largest score so far, the sum of the exponentials of all scores relative to it,
    and the sum of the values weighted so, in at least float32.
    """

    def __init__(self, q: Tensor, first: int, groups: int, value: int, spec: AttentionSpec) -> None:
        heads, rows, width = q.shape
        exact = torch.promote_types(q.dtype, torch.float32)
        self._q, self._first, self._spec = q.reshape(groups, heads // groups, rows, width), first, spec
        shape = groups, heads // groups, rows, 1
        self._most = torch.full(shape, float("-inf"), dtype=exact, device=q.device)
        self._sum = torch.zeros(shape, dtype=exact, device=q.device)
        self._out = torch.zeros((*shape[:3], value), dtype=exact, device=q.device)

    def add(self, k: Tensor, v: Tensor, start: int) -> None:
        """Attends to k [groups, n, dk] and v [groups, n, dv] at positions from `start` on."""
        groups, share, rows, _ = self._q.shape
        block = max(_SCORES // (groups * share * k.shape[1]), 1)
        for row in range(0, rows, block):
            self._add(slice(row, min(row + block, rows)), k, v, start)

    def _add(self, rows: slice, k: Tensor, v: Tensor, start: int) -> None:
        q, spec, exact = self._q[:, :, rows], self._spec, self._out.dtype
        groups, share, count, _ = q.shape
        scores = (q.reshape(groups, share * count, -1) @ k.transpose(1, 2)).to(exact).mul_(spec.scale)
        scores = scores.view(groups, share, count, -1)
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap).mul_(spec.softcap)
        if (hidden := self._hidden(self._first + rows.start, count, start, k.shape[1])) is not None:
            scores.masked_fill_(hidden, float("-inf"))
        before = self._most[:, :, rows]
        most = torch.maximum(before, scores.amax(-1, keepdim=True))
        base = most.masked_fill(most == float("-inf"), 0.0)  # rows that have seen no key yet
        weights = scores.sub_(base).exp_()
        fade = (before - base).exp_()
        added = weights.to(v.dtype).view(groups, share * count, -1) @ v
        self._sum[:, :, rows] = self._sum[:, :, rows] * fade + weights.sum(-1, keepdim=True)
        self._out[:, :, rows] = self._out[:, :, rows] * fade + added.to(exact).view(*fade.shape[:3], -1)
        self._most[:, :, rows] = most

    def _hidden(self, first: int, rows: int, start: int, keys: int) -> Tensor | None:
        """Mask [rows, keys], True where a query does not attend; None where each attends to all."""
        window = self._spec.window
        if start + keys <= first + 1 and (window is None or first + rows - 1 - start < window):
            return None
        device = self._q.device
        age = torch.arange(first, first + rows, device=device)[:, None]
        age = age - torch.arange(start, start + keys, device=device)
        return age < 0 if window is None else (age < 0) | (age >= window)

    def result(self) -> Tensor:
        """The output [heads, t, dv] in the queries' type."""
        total, out = self._sum, self._out
        if self._spec.sinks is not None:
            sinks = self._spec.sinks.to(out.dtype).view(*out.shape[:2], 1, 1)
            most = torch.maximum(self._most, sinks)
            fade = (self._most - most).exp_()
            total, out = total * fade + (sinks - most).exp_(), out * fade
        return (out / total).to(self._q.dtype).flatten(0, 1)
