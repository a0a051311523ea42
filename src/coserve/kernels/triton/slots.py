"""Slots on a GPU by the segmented kernels; `lora/slots.py` is for CPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.kernels.lora.layout import Layout
from coserve.kernels.lora.slots import SlotWeights
from coserve.kernels.triton import segmented
from coserve.kernels.triton.tiles import Tiles


class TritonSlots:
    """A LoRA backend for tables with ranks first, from ranges of rows without overlaps and their slots, as
    tiles of one row. `shrink` gives [all rows, all ranks], zeros for rows without a slot."""

    def __init__(self, segments: Sequence[tuple[slice, int]], device: torch.device) -> None:
        self._segments = [
            (slice(row, row + 1), slot) for rows, slot in segments for row in range(rows.start, rows.stop)
        ]
        self._device = device
        self._made: dict[tuple[int, int], Tiles] = {}

    def shrink(self, x: Tensor, weights: SlotWeights) -> Tensor:
        """See `LoraBackend`."""
        return segmented.shrink(x, weights.down.flatten(0, 1), self._tiles(weights.down))

    def expand_(self, h: Tensor, weights: SlotWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        own, table = h[:, weights.ranks], weights.up.flatten(0, 1)
        segmented.expand_(own, table, y, self._tiles(weights.up))

    def _tiles(self, table: Tensor) -> Tiles:
        """Tiles for a table [slots, rank, width]."""
        slots, rank = table.shape[0], table.shape[1]
        if (slots, rank) not in self._made:
            self._made[slots, rank] = Tiles.of(Layout.of(self._segments, [rank] * slots), self._device)
        return self._made[slots, rank]
