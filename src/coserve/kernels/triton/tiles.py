"""A layout for kernels: tiles of rows, each with its adapter's ranks."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from coserve.kernels.lora.layout import Layout
from coserve.kernels.row_tiles import LARGEST, RowTiles


def tile_rows(layout: Layout) -> int:
    """Rows of a tile: 1 where segments are decode rows, which then need no matrix units and no padding."""
    longest = max((rows.stop - rows.start for rows in layout.rows), default=1)
    return 1 if longest <= 4 else LARGEST


@dataclass(frozen=True)
class Tiles:
    """Tiles of a layout on a device: tile i has `counts[i]` rows from `starts[i]` on, and ranks from
    `first[i]` on, `ranks[i]` of them, of adapter `owners[i]`. All int32 [tiles]. `size` is the largest number
    of rows of a tile."""

    layout: Layout
    size: int
    starts: Tensor
    counts: Tensor
    first: Tensor
    ranks: Tensor
    owners: Tensor

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "Tiles":
        size = tile_rows(layout)
        found = [
            (start, min(size, rows.stop - start), ranks.start, ranks.stop - ranks.start, owner)
            for (rows, ranks), owner in zip(layout, layout.owners, strict=True)
            for start in range(rows.start, rows.stop, size)
        ]
        columns = torch.tensor(found, dtype=torch.int32).view(-1, 5).t().contiguous().to(device)
        starts, counts, first, ranks, owners = columns.unbind()
        return Tiles(layout, size, starts, counts, first, ranks, owners)

    @staticmethod
    def of_slots(slots: Tensor, rank: int, tiles: RowTiles | None = None) -> "Tiles":
        """Tiles for tables with `rank` ranks a slot, of one row each unless `tiles` are given; `slots` [rows]
        int32 has each row's, or -1. All is computed on the device."""
        if tiles is None:
            size, starts = 1, torch.arange(len(slots), dtype=torch.int32, device=slots.device)
            counts = torch.ones_like(slots)
        else:
            size, starts, counts, slots = LARGEST, tiles.starts, tiles.counts, slots[tiles.starts]
        own = (slots >= 0).to(torch.int32)
        layout = Layout((), (), (slice(0, rank),))
        return Tiles(layout, size, starts, counts, slots * rank * own, rank * own, slots)

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def largest_rank(self) -> int:
        return max((ranks.stop - ranks.start for ranks in self.layout.ranks), default=0)

    @cached_property
    def by_owner(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tiles sorted by adapter, and each adapter's first tile and number of tiles, int32."""
        owners = self.layout.owners
        per_segment = [-(-(rows.stop - rows.start) // self.size) for rows in self.layout.rows]
        of_tile = [owner for owner, tiles in zip(owners, per_segment, strict=True) for _ in range(tiles)]
        order = sorted(range(len(of_tile)), key=of_tile.__getitem__)  # on the host: a GPU would be waited for
        counts = [0] * len(self.layout.ranks)
        for owner in of_tile:
            counts[owner] += 1
        firsts = [total - count for total, count in zip(accumulate(counts), counts, strict=True)]
        device = self.starts.device
        spans = torch.tensor([firsts, counts], dtype=torch.int32).to(device)
        return torch.tensor(order, dtype=torch.int32).to(device), spans[0], spans[1]

    @cached_property
    def rank_spans(self) -> tuple[Tensor, Tensor]:
        """First rank and number of ranks of each adapter, int32."""
        found = [(ranks.start, ranks.stop - ranks.start) for ranks in self.layout.ranks]
        first, count = (
            torch.tensor(found, dtype=torch.int32).view(-1, 2).t().contiguous().to(self.starts.device)
        )
        return first, count
