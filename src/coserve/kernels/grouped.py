"""Grouped: the rows of all adapters in one batch, which is split only where an adapter is multiplied (the
report's 4.3.3; PEFT's mixed batches).

Two products for each segment. The plain twins are `reference.shrink`, `expand` and `outer`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.layout import Layout


@dataclass(frozen=True, slots=True)
class Grouped:
    """A layout, multiplied segment by segment; what lies between is [rows, largest rank]."""

    layout: Layout

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        """x [rows, in] by each row's own ranks of a [ranks, in]: [rows, largest rank], zero beyond those."""
        h = x.new_zeros(len(x), self._largest)
        for rows, ranks in self.layout:
            h[rows, : ranks.stop - ranks.start] = x[rows] @ a[ranks].t()
        return h

    def expand_(self, h: Tensor, b: Tensor, y: Tensor) -> None:
        """y [rows, out] += what `shrink` gave by each row's own ranks of b [ranks, out]."""
        for rows, ranks in self.layout:
            y[rows].addmm_(h[rows, : ranks.stop - ranks.start], b[ranks])

    def outer(self, h: Tensor, x: Tensor) -> Tensor:
        """[ranks, in]: of each adapter hᵀ x over its own rows, in h's type."""
        found = x.new_zeros(self.layout.total_ranks, x.shape[1])
        for rows, ranks in self.layout:
            own = found[ranks]
            torch.addmm(own, h[rows, : ranks.stop - ranks.start].t(), x[rows], out=own)
        return found

    @property
    def _largest(self) -> int:
        return max((ranks.stop - ranks.start for ranks in self.layout.ranks), default=0)
