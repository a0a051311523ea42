"""A stack of adapters on a GPU: what `gathered.Stack` is on a CPU, with the segmented kernels."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from coserve.kernels.layout import Layout
from coserve.kernels.triton import segmented
from coserve.kernels.triton.tiles import Tiles


class TritonStack:
    """As `gathered.Stack`; the table of A is [slots, rank of all linears, in]."""

    def __init__(self, slots: int, rank: int, inputs: int, outputs: Sequence[int], like: Tensor) -> None:
        self.slots, self.rank, self.linears = slots, rank, len(outputs)
        self._down = like.new_empty(slots, rank * len(outputs), inputs)
        self._up = [like.new_empty(slots, rank, width) for width in outputs]

    @property
    def slot_nbytes(self) -> int:
        return sum(table[0].nbytes for table in (self._down, *self._up))

    def put(self, slot: int, linear: int, a: Tensor, b: Tensor, scale: float) -> None:
        rank = len(a)
        down = self._down[slot, linear * self.rank : (linear + 1) * self.rank]
        down[:rank], down[rank:] = a, 0
        up = self._up[linear][slot]
        up[:rank], up[rank:] = b.t() * scale, 0

    def shrink(self, x: Tensor, owned: "RowTiles") -> Tensor:
        tiles = owned.tiles(self.slots, self.rank * self.linears)
        return segmented.shrink(x, self._down.flatten(0, 1), tiles)

    def expand(self, linear: int, h: Tensor, owned: "RowTiles") -> Tensor:
        table = self._up[linear].flatten(0, 1)
        y = h.new_zeros(len(h), table.shape[1])
        own = h[:, linear * self.rank : (linear + 1) * self.rank]
        segmented.expand_(own, table, y, owned.tiles(self.slots, self.rank))
        return y


class RowTiles:
    """As `gathered.Owned`: which slot each of some rows belongs to, as tiles of one row."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self._slots, self._device = tuple(slots), device
        self._made: dict[tuple[int, int], Tiles] = {}

    def tiles(self, slots: int, rank: int) -> Tiles:
        """Tiles for tables of so many slots of this rank."""
        if (slots, rank) not in self._made:
            layout = Layout.of(self._segments, [rank] * slots)
            self._made[slots, rank] = Tiles.of(layout, self._device)
        return self._made[slots, rank]

    @cached_property
    def _segments(self) -> list[tuple[slice, int]]:
        return [(slice(row, row + 1), slot) for row, slot in enumerate(self._slots)]
