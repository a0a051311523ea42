"""Block-sparse products: the intermediate rows x ranks of adapters as blocks.

In the report's words DDS makes the blocks (dense by dense), SDD multiplies them on (sparse by dense); the
third one, for the gradients of the matrices, multiplies the blocks' transposes. Ranks may be any number, as
partial blocks are masked; blocks of decode rows are one row high. Each block is one program, so an adapter's
cost follows its own rank, not the largest. The plain twins are `reference.multi_lora` and
`multi_lora_backward`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.lora.layout import Layout
from coserve.kernels.row_tiles import LARGEST
from coserve.kernels.triton.segmented import multiply
from coserve.kernels.triton.tiles import tile_rows

_RANKS, _WIDTH = 16, 64


@dataclass(frozen=True)
class Topology:
    """The blocks of a layout, those of the same rows consecutively. Block i has `rows[i]` rows from
    `row_of[i]` on and `ranks[i]` ranks from `rank_of[i]` on; tile j of rows has `spans[1, j]` blocks from
    `spans[0, j]` on. int32. `size` is the height of a block."""

    layout: Layout
    size: int
    row_of: Tensor
    rows: Tensor
    rank_of: Tensor
    ranks: Tensor
    spans: Tensor

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "Topology":
        size = tile_rows(layout)
        blocks: list[tuple[int, int, int, int]] = []
        spans: list[tuple[int, int]] = []
        for rows, ranks in layout:
            for row in range(rows.start, rows.stop, size):
                first = len(blocks)
                blocks += [
                    (row, min(size, rows.stop - row), rank, min(_RANKS, ranks.stop - rank))
                    for rank in range(ranks.start, ranks.stop, _RANKS)
                ]
                spans.append((first, len(blocks) - first))
        columns = torch.tensor(blocks, dtype=torch.int32).view(-1, 4).t().contiguous().to(device)
        row_of, heights, rank_of, widths = columns.unbind()
        tiles = torch.tensor(spans, dtype=torch.int32).view(-1, 2).t().contiguous().to(device)
        return Topology(layout, size, row_of, heights, rank_of, widths, tiles)

    @property
    def blocks(self) -> int:
        return len(self.row_of)

    @cached_property
    def by_rank(self) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks sorted by ranks, and the first and the number of each distinct one, int32: the transpose's
        order."""
        order = torch.argsort(self.rank_of, stable=True)
        _, counts = torch.unique_consecutive(self.rank_of[order], return_counts=True)
        return order.to(torch.int32), (counts.cumsum(0) - counts).to(torch.int32), counts.to(torch.int32)


def dds(x: Tensor, a: Tensor, topology: Topology) -> Tensor:
    """The blocks of x [rows, in] · aᵀ, a [ranks, in]: [blocks, size, 16] in x's type, zero in padding."""
    values = x.new_zeros(topology.blocks, topology.size, _RANKS)
    if topology.blocks:
        _dds[(topology.blocks,)](
            x, a, values, *_columns(topology), x.shape[1], x.stride(0), *_block(topology)
        )  # fmt: skip
    return values


def sdd_(values: Tensor, b: Tensor, y: Tensor, topology: Topology) -> None:
    """y [rows, out] += the blocks times b [ranks, out]."""
    if topology.blocks:
        grid = (topology.spans.shape[1], triton.cdiv(y.shape[1], _WIDTH))
        _sdd[grid](
            values, b, y, topology.spans[0], topology.spans[1], *_columns(topology), y.shape[1], y.stride(0),
            *_block(topology),
        )  # fmt: skip


def transposed(values: Tensor, x: Tensor, topology: Topology) -> Tensor:
    """The blocks' transposes times x [rows, in]: [ranks, in] in float32."""
    found = torch.zeros(topology.layout.total_ranks, x.shape[1], device=x.device, dtype=torch.float32)
    if topology.blocks:
        order, firsts, counts = topology.by_rank
        grid = (len(firsts), triton.cdiv(x.shape[1], _WIDTH))
        _transposed[grid](
            values, x, found, order, firsts, counts, *_columns(topology), x.shape[1], x.stride(0),
            *_block(topology),
        )  # fmt: skip
    return found


def _columns(topology: Topology) -> tuple[Tensor, ...]:
    return topology.row_of, topology.rows, topology.rank_of, topology.ranks


def _block(topology: Topology) -> tuple[int, int, int, bool]:
    return topology.size, _RANKS, _WIDTH, topology.size >= LARGEST


@triton.jit
def _dds(
    x, a, values, row_of, rows, rank_of, ranks, width, x_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place, own = tl.arange(0, ROWS), tl.arange(0, RANKS)
    is_row, is_own = place < tl.load(rows + block), own < tl.load(ranks + block)
    row = tl.load(row_of + block) + place
    rank = tl.load(rank_of + block) + own
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        is_column = column < width
        given = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        weights = tl.load(
            a + rank[None, :].to(tl.int64) * width + column[:, None],
            mask=is_own[None, :] & is_column[:, None],
            other=0.0,
        )
        total = multiply(given, weights, total, DOT)
    into = values + block * ROWS * RANKS + place[:, None] * RANKS + own[None, :]
    tl.store(into, total.to(values.dtype.element_ty), mask=is_row[:, None] & is_own[None, :])


@triton.jit
def _sdd(
    values, b, y, firsts, counts, row_of, rows, rank_of, ranks, width, y_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    first, count = tl.load(firsts + tl.program_id(0)), tl.load(counts + tl.program_id(0))
    place, own = tl.arange(0, ROWS), tl.arange(0, RANKS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < width
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for block in range(first, first + count):
        rank = tl.load(rank_of + block) + own
        is_own = own < tl.load(ranks + block)
        at = values + block * ROWS * RANKS
        small = tl.load(at + place[:, None] * RANKS + own[None, :])
        weights = tl.load(
            b + rank[:, None].to(tl.int64) * width + column[None, :],
            mask=is_own[:, None] & is_column[None, :],
            other=0.0,
        )
        total = multiply(small, weights, total, DOT)
    row = tl.load(row_of + first) + place
    is_there = (place < tl.load(rows + first))[:, None] & is_column[None, :]
    into = y + row[:, None].to(tl.int64) * y_stride + column[None, :]
    before = tl.load(into, mask=is_there, other=0.0).to(tl.float32)
    tl.store(into, (before + total).to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _transposed(
    values, x, found, order, firsts, counts, row_of, rows, rank_of, ranks, width, x_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    first, count = tl.load(firsts + tl.program_id(0)), tl.load(counts + tl.program_id(0))
    place, own = tl.arange(0, ROWS), tl.arange(0, RANKS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < width
    total = tl.zeros((RANKS, WIDTH), tl.float32)
    for i in range(first, first + count):
        block = tl.load(order + i)
        row = tl.load(row_of + block) + place
        is_row = place < tl.load(rows + block)
        at = values + block * ROWS * RANKS
        small = tl.load(at + place[None, :] * RANKS + own[:, None])
        given = tl.load(
            x + row[:, None].to(tl.int64) * x_stride + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        total = multiply(small, given, total, DOT)
    block = tl.load(order + first)
    is_own = own < tl.load(ranks + block)
    into = found + (tl.load(rank_of + block) + own)[:, None].to(tl.int64) * width + column[None, :]
    tl.store(into, total, mask=is_own[:, None] & is_column[None, :])
