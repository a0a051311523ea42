"""Gradients that later windows find for earlier rows' keys and values, summed until those rows go back
themselves (FlexLLM 6.1, figure 10): in at least float32, over the rows of one example.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.memory.arena import Lease
from coserve.train.window import KV


@dataclass(frozen=True, slots=True)
class _Sums:
    """Gradients for rows [first, first + n): keys [groups, n, dk] and values [groups, n, dv]."""

    first: int
    keys: Tensor
    values: Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[1]


def zeros_like_one(x: Tensor, lease: Lease) -> Tensor:
    """Zeros in the shape of x[0], in at least float32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return lease.take(x.shape[1:], exact, x.device).zero_()


class KVGradAccumulator:
    """Sums by layer. Windows come from the right, so a sum is begun with its most rows; several may cover the
    same rows where other layers read a layer's keys and values."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._sums: dict[int, list[_Sums]] = {}

    def add(self, layer: int, rows: slice, grads: KV) -> None:
        """Adds gradients [1, groups, n, width] for the keys, and the values, of n rows."""
        first, end = rows.start or 0, rows.stop
        held = self._covering(layer, first, end)
        if held is None:
            held = _Sums(first, *(zeros_like_one(given, self._lease) for given in grads))
            self._sums.setdefault(layer, []).append(held)
        span = slice(first - held.first, end - held.first)
        held.keys[:, span] += grads[0][0]
        held.values[:, span] += grads[1][0]

    def collect(self, layer: int, rows: slice, dtype: torch.dtype) -> KV | None:
        """The gradients of a window's keys and values, [1, groups, rows, width]; None if there are none.
        Sums of which no row is left of the window are closed."""
        due = [a for a in self._sums.get(layer, ()) if a.first < rows.stop and rows.start < a.end]
        if not due:
            return None
        found = self._over(due, rows, dtype)
        for held in due:
            if held.first >= rows.start:
                self._sums[layer].remove(held)
                self._lease.give_back((held.keys, held.values))
        return found

    def _covering(self, layer: int, first: int, end: int) -> _Sums | None:
        sums = self._sums.get(layer, ())
        return next((a for a in sums if a.first <= first and end <= a.end), None)

    def _over(self, due: list[_Sums], rows: slice, dtype: torch.dtype) -> KV:
        """All sums together over exactly these rows, zero where there are none."""
        count = rows.stop - rows.start
        sums = []
        for stores in ([a.keys for a in due], [a.values for a in due]):
            groups, _, width = stores[0].shape
            total = stores[0].new_zeros(1, groups, count, width, dtype=dtype)
            for held, store in zip(due, stores, strict=True):
                first, end = max(held.first, rows.start), min(held.end, rows.stop)
                total[0, :, first - rows.start : end - rows.start] += store[
                    :, first - held.first : end - held.first
                ]
            sums.append(total)
        return sums[0], sums[1]
