"""Segmented gather: shrink and expand over tiles of rows, each with its adapter's ranks (Punica, S-LoRA).

The intermediate is [rows, largest rank]; a tile fills its adapter's ranks, and programs beyond those end at
once. Tiles of one row are multiplied without matrix units, so decode rows are not padded. The plain twins are
`reference.multi_lora` and `multi_lora_backward`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.row_tiles import LARGEST
from coserve.kernels.triton.tiles import Tiles

_RANKS, _WIDTH = 16, 64  # of a program's block


def shrink(x: Tensor, a: Tensor, tiles: Tiles, clears: bool = True) -> Tensor:
    """x [rows, in] times each row's ranks of a [ranks, in]: [rows, largest rank] in x's type; columns beyond
    an adapter's ranks, and rows without an adapter, are zero where it `clears`, else anything."""
    h = (x.new_zeros if clears else x.new_empty)(len(x), tiles.largest_rank)
    if h.numel():
        grid = (tiles.count, triton.cdiv(tiles.largest_rank, _RANKS))
        _shrink[grid](x, a, h, *_columns(tiles), x.shape[1], x.stride(0), h.shape[1], *_block(tiles))
    return h


def expand_(h: Tensor, b: Tensor, y: Tensor, tiles: Tiles) -> None:
    """y [rows, out] += h [rows, largest rank] times each row's ranks of b [ranks, out]."""
    if h.numel():
        grid = (tiles.count, triton.cdiv(y.shape[1], _WIDTH))
        _expand[grid](h, b, y, *_columns(tiles), y.shape[1], h.stride(0), y.stride(0), *_block(tiles))


def expand_siblings_(h: Tensor, tables: Sequence[Tensor], ys: Sequence[Tensor], tiles: Tiles) -> None:
    """As `expand_` for two or three linears, in one launch: sibling i has `largest_rank` columns of h, behind
    those of the siblings before it, the table `tables[i]` [ranks, out i] and the output `ys[i]` [rows, out
    i]."""
    assert len(tables) == len(ys) and len(ys) in (2, 3), "two or three linears"
    if not h.numel():
        return
    first, second, third = (*tables, tables[-1])[:3]
    one, two, three = (*ys, ys[-1])[:3]
    widths = [*(y.shape[1] for y in ys), 0][:3]
    grid = (tiles.count, sum(triton.cdiv(width, _WIDTH) for width in widths))
    _expand_siblings[grid](
        h, first, second, third, one, two, three, *_columns(tiles), *widths, tiles.largest_rank,
        h.stride(0), one.stride(0), two.stride(0), three.stride(0), *_block(tiles),
    )  # fmt: skip


def outer(h: Tensor, x: Tensor, tiles: Tiles) -> Tensor:
    """[ranks, in]: hᵀ x of each adapter over all its segments, in at least float32."""
    found = torch.zeros(tiles.layout.total_ranks, x.shape[1], device=x.device, dtype=torch.float32)
    if found.numel():
        grid = (
            len(tiles.layout.ranks),
            triton.cdiv(tiles.largest_rank, _RANKS),
            triton.cdiv(x.shape[1], _WIDTH),
        )
        order, firsts, counts = tiles.by_owner
        _outer[grid](
            h, x, found, tiles.starts, tiles.counts, order, firsts, counts, *tiles.rank_spans,
            x.shape[1], h.stride(0), x.stride(0), *_block(tiles),
        )  # fmt: skip
    return found


def _columns(tiles: Tiles) -> tuple[Tensor, ...]:
    return tiles.starts, tiles.counts, tiles.first, tiles.ranks


def _block(tiles: Tiles) -> tuple[int, int, int, bool]:
    return tiles.size, _RANKS, _WIDTH, tiles.size >= LARGEST


@triton.jit
def multiply(left, right, total, DOT: tl.constexpr):
    """total + left [m, k] · right [k, n], in float32; by matrix units where the block is large enough. Triton
    compiles annotations too, and knows none of Python's."""
    if DOT:
        return tl.dot(left, right, total, input_precision="ieee")
    if (
        left.shape[1] == 1
    ):  # of one number alone Triton 3.6 makes a sum of eight on a GPU: lanes that repeat it
        return total + left.to(tl.float32) * right.to(tl.float32)
    return total + tl.sum(left[:, :, None].to(tl.float32) * right[None, :, :].to(tl.float32), axis=1)


@triton.jit
def _shrink(
    x, a, h, starts, counts, first, ranks, width, x_stride, h_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    rank = tl.load(ranks + tile)
    own = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < rank:
        row = tl.load(starts + tile) + tl.arange(0, ROWS)
        is_row = tl.arange(0, ROWS) < tl.load(counts + tile)
        matrix = a + (tl.load(first + tile) + own)[None, :].to(tl.int64) * width
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            given = tl.load(
                x + row[:, None].to(tl.int64) * x_stride + column[None, :],
                mask=is_row[:, None] & (column < width)[None, :],
                other=0.0,
            )
            weights = tl.load(
                matrix + column[:, None], mask=(own < rank)[None, :] & (column < width)[:, None], other=0.0
            )
            total = multiply(given, weights, total, DOT)
        into = h + row[:, None].to(tl.int64) * h_stride + own[None, :]
        tl.store(into, total.to(h.dtype.element_ty), mask=is_row[:, None] & (own < rank)[None, :])


@triton.jit
def _expand(
    h, b, y, starts, counts, first, ranks, width, h_stride, y_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    _add_block(
        h, b, y, starts, counts, first, ranks, tl.program_id(1), width, h_stride, y_stride,
        ROWS, RANKS, WIDTH, DOT,
    )  # fmt: skip


@triton.jit
def _expand_siblings(
    h, b, c, d, y, z, u, starts, counts, first, ranks, width, second_width, third_width, all_ranks,
    h_stride, y_stride, z_stride, u_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    block, blocks, more = tl.program_id(1), tl.cdiv(width, WIDTH), tl.cdiv(second_width, WIDTH)
    if block < blocks:
        _add_block(
            h, b, y, starts, counts, first, ranks, block, width, h_stride, y_stride,
            ROWS, RANKS, WIDTH, DOT,
        )  # fmt: skip
    elif block < blocks + more:
        _add_block(
            h + all_ranks, c, z, starts, counts, first, ranks, block - blocks, second_width,
            h_stride, z_stride, ROWS, RANKS, WIDTH, DOT,
        )  # fmt: skip
    else:
        _add_block(
            h + 2 * all_ranks, d, u, starts, counts, first, ranks, block - blocks - more, third_width,
            h_stride, u_stride, ROWS, RANKS, WIDTH, DOT,
        )  # fmt: skip


@triton.jit
def _add_block(
    h, b, y, starts, counts, first, ranks, block, width, h_stride, y_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    rank = tl.load(ranks + tile)
    row = tl.load(starts + tile) + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < tl.load(counts + tile)
    column = block * WIDTH + tl.arange(0, WIDTH)
    is_column = column < width
    matrix = b + tl.load(first + tile).to(tl.int64) * width
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, rank, RANKS):
        own = start + tl.arange(0, RANKS)
        small = tl.load(
            h + row[:, None].to(tl.int64) * h_stride + own[None, :],
            mask=is_row[:, None] & (own < rank)[None, :],
            other=0.0,
        )
        weights = tl.load(
            matrix + own[:, None].to(tl.int64) * width + column[None, :],
            mask=(own < rank)[:, None] & is_column[None, :],
            other=0.0,
        )
        total = multiply(small, weights, total, DOT)
    into = y + row[:, None].to(tl.int64) * y_stride + column[None, :]
    is_there = is_row[:, None] & is_column[None, :]
    before = tl.load(into, mask=is_there, other=0.0).to(tl.float32)
    tl.store(into, (before + total).to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _outer(
    h, x, found, starts, counts, order, owner_first, owner_count, rank_first, rank_count,
    width, h_stride, x_stride,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0)
    rank = tl.load(rank_count + owner)
    own = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < width
    if tl.program_id(1) * RANKS < rank:
        total = tl.zeros((RANKS, WIDTH), tl.float32)
        begin = tl.load(owner_first + owner)
        for place in range(begin, begin + tl.load(owner_count + owner)):
            tile = tl.load(order + place)
            row = tl.load(starts + tile) + tl.arange(0, ROWS)
            is_row = tl.arange(0, ROWS) < tl.load(counts + tile)
            small = tl.load(
                h + row[None, :].to(tl.int64) * h_stride + own[:, None],
                mask=is_row[None, :] & (own < rank)[:, None],
                other=0.0,
            )
            given = tl.load(
                x + row[:, None].to(tl.int64) * x_stride + column[None, :],
                mask=is_row[:, None] & is_column[None, :],
                other=0.0,
            )
            total = multiply(small, given, total, DOT)
        into = found + (tl.load(rank_first + owner) + own)[:, None].to(tl.int64) * width + column[None, :]
        tl.store(into, total, mask=(own < rank)[:, None] & is_column[None, :])
