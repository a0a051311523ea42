"""Block-sparse products in plain torch: what lies between adapters' two matrices as blocks of rows x ranks,
all blocks of one size in one batched product.

In the report's words (4.3.4) DDS makes the blocks (dense by dense) and SDD multiplies them on (sparse by
dense); the third product, for the gradients of the matrices, multiplies the blocks' transposes. A block has
as many ranks as its adapter, so ranks need be multiples of nothing; it is as high as suits the segments, so
decode rows are filled up to one another's number and not to sixteen. What is filled up is a row of zeros of
the block's own adapter: nobody sees another's numbers. The plain twins are `reference.multi_lora` and
`multi_lora_backward`; `triton/blocksparse.py` has the kernels for GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import TableBackend
from coserve.kernels.lora.layout import Layout

# A block's weights are read and packed anew, which costs about as much as so many rows of it.
_ROWS_FOR_WEIGHTS: Final = 24


@dataclass(frozen=True, slots=True)
class Class:
    """The blocks of one size, `height` rows x `rank` ranks: block i has `lines[i]` of the rows, where one
    past the last row stands for none, and its adapter's ranks. `held` is their place between the products."""

    height: int
    rank: int
    lines: Tensor  # int64 [blocks, height]
    filled: Tensor  # int64: which of the lines, end to end, are rows
    ranks: slice | Tensor  # of a table, block after block
    held: slice
    dense: slice | None  # the rows, where they lie in one range and nothing is filled up
    once: bool  # whether no adapter has two blocks

    @property
    def blocks(self) -> int:
        return len(self.lines)

    def weights(self, table: Tensor) -> Tensor:
        """[blocks, rank, width] of table [ranks, width]; a view where the blocks' adapters lie in order."""
        return table[self.ranks].view(self.blocks, self.rank, -1)

    def rows(self, x: Tensor) -> Tensor:
        """[blocks, height, width] of x [rows, width], zeros where there is no row."""
        if self.dense is not None:
            return x[self.dense].view(self.blocks, self.height, -1)
        if len(self.filled) == self.lines.numel():
            return x[self.lines]
        taken = x.new_zeros(self.lines.numel(), x.shape[1])
        taken[self.filled] = x[self.lines.flatten()[self.filled]]
        return taken.view(self.blocks, self.height, -1)

    def add_(self, y: Tensor, products: Tensor) -> None:
        """Rows of products [blocks, height, width] to where they belong in y [rows, width]."""
        lines, added = self.lines.flatten(), products.flatten(0, 1)
        if len(self.filled) < len(lines):
            lines, added = lines[self.filled], added[self.filled]
        y.index_add_(0, lines, added)


@dataclass(frozen=True, slots=True)
class BlockSparse(TableBackend):
    """A layout as blocks; what lies between is [numbers of all blocks], one after the other."""

    layout: Layout
    classes: tuple[Class, ...]
    size: int

    @staticmethod
    def of(layout: Layout, rows: int, device: torch.device) -> "BlockSparse":
        """Tables for tensors of so many rows."""
        of_rank = sorted(layout, key=lambda block: (_length(block[1]), block[0].start))
        classes: list[Class] = []
        size = 0
        for rank, segments in groupby(of_rank, key=lambda block: _length(block[1])):
            made = _class(list(segments), rank, size, rows, device)
            size = made.held.stop
            classes.append(made)
        return BlockSparse(layout, tuple(classes), size)

    def _shrink(self, x: Tensor, table: Tensor) -> Tensor:
        """DDS: the blocks of x [rows, in] · tableᵀ, table [ranks, in], in x's type."""
        h = x.new_empty(self.size)
        for c in self.classes:
            torch.bmm(c.rows(x), c.weights(table).transpose(1, 2), out=_blocks(h, c))
        return h

    def _expand_(self, h: Tensor, table: Tensor, y: Tensor) -> None:
        """SDD: y [rows, out] += the blocks by table [ranks, out]."""
        for c in self.classes:
            if c.dense is not None:
                y[c.dense].view(c.blocks, c.height, -1).baddbmm_(_blocks(h, c), c.weights(table))
                continue
            c.add_(y, torch.bmm(_blocks(h, c), c.weights(table)))

    def _outer(self, h: Tensor, x: Tensor) -> Tensor:
        """The blocks' transposes by x [rows, in]: [ranks, in], blocks of one adapter added up in float32."""
        exact = torch.promote_types(x.dtype, torch.float32)
        dtype = x.dtype if all(c.once for c in self.classes) else exact
        found = torch.zeros(self.layout.total_ranks, x.shape[1], dtype=dtype, device=x.device)
        for c in self.classes:
            products = torch.bmm(_blocks(h, c).transpose(1, 2), c.rows(x)).flatten(0, 1)
            if c.once:
                found[c.ranks] = products.to(dtype)
            else:
                found.index_add_(0, _as_index(c.ranks, x.device), products.to(dtype))
        return found


def _blocks(h: Tensor, c: Class) -> Tensor:
    return h[c.held].view(c.blocks, c.height, c.rank)


def _class(
    segments: Sequence[tuple[slice, slice]], rank: int, start: int, rows: int, device: torch.device
) -> Class:
    height = _height([_length(segment) for segment, _ in segments])
    tiles = [
        (row, min(row + height, segment.stop), ranks)
        for segment, ranks in segments
        for row in range(segment.start, segment.stop, height)
    ]
    lines = torch.full((len(tiles), height), rows, dtype=torch.int64)
    for i, (first, last, _) in enumerate(tiles):
        lines[i, : last - first] = torch.arange(first, last)
    flat = lines.flatten().tolist()
    is_dense = flat == list(range(flat[0], flat[0] + len(flat))) and flat[-1] < rows
    return Class(
        height,
        rank,
        lines.to(device),
        (lines.flatten() < rows).nonzero().flatten().to(device),
        _in_order([ranks for _, _, ranks in tiles], device),
        slice(start, start + len(tiles) * height * rank),
        slice(flat[0], flat[-1] + 1) if is_dense else None,
        len({ranks.start for _, _, ranks in tiles}) == len(tiles),
    )


def _height(lengths: Sequence[int]) -> int:
    """Height of the blocks for segments of these lengths: where reading weights and filling up cost least."""
    heights = sorted({max(lengths), *(1 << power for power in range(9))})
    return min(heights, key=lambda h: sum(-(-n // h) for n in lengths) * (h + _ROWS_FOR_WEIGHTS))


def _in_order(spans: Sequence[slice], device: torch.device) -> slice | Tensor:
    """Ranges of ranks one after the other: a slice where they touch."""
    if all(left.stop == right.start for left, right in pairwise(spans)):
        return slice(spans[0].start, spans[-1].stop)
    return torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)


def _as_index(ranks: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(ranks.start, ranks.stop, device=device) if isinstance(ranks, slice) else ranks


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length
