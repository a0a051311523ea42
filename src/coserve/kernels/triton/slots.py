"""Slots on a GPU by the segmented kernels; `lora/slots.py` is for CPUs."""

from collections.abc import Sequence

from torch import Tensor

from coserve.kernels.lora.slots import SlotWeights
from coserve.kernels.row_tiles import RowTiles
from coserve.kernels.triton import segmented
from coserve.kernels.triton.tiles import Tiles


class TritonSlots:
    """A LoRA backend for tables with ranks first, from the slot of each row or -1, [rows] int32 on the
    device: each row is a tile, unless `tiles` are given, whose rows have one slot each. A tile without a slot
    has no ranks. Nothing of it is known to the host, so that a CUDA graph may hold its products. `shrink`
    gives [all rows, all ranks], anything for rows without a slot, which `expand_` does not read.
    """

    def __init__(self, slots: Tensor, tiles: RowTiles | None = None) -> None:
        self._slots, self._of_rows = slots, tiles
        self._made: dict[int, Tiles] = {}

    def shrink(self, x: Tensor, weights: SlotWeights) -> Tensor:
        """See `LoraBackend`."""
        return segmented.shrink(x, weights.down.flatten(0, 1), self._tiles(weights.down.shape[1]), False)

    def expand_(self, h: Tensor, weights: SlotWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        own, table = h[:, weights.ranks], weights.up.flatten(0, 1)
        segmented.expand_(own, table, y, self._tiles(weights.up.shape[1]))

    def expand_siblings_(self, h: Tensor, weights: Sequence[SlotWeights], ys: Sequence[Tensor]) -> None:
        """As `expand_` for all linears of the same `down`, two or three, in one launch."""
        tables = [own.up.flatten(0, 1) for own in weights]
        segmented.expand_siblings_(h, tables, ys, self._tiles(weights[0].up.shape[1]))

    def _tiles(self, rank: int) -> Tiles:
        """Tiles for tables [slots, rank, width]."""
        if rank not in self._made:
            self._made[rank] = Tiles.of_slots(self._slots, rank, self._of_rows)
        return self._made[rank]
