"""Attention of decode rows, and of rows in tiles, to pages, read where they are: nothing is gathered first.

Gathering pages reads and writes them before the products read them again, three times the bytes. One program
has the queries of one sequence in one group of heads, and passes `_SPLIT` positions of its pages once, as
flash attention does; a second kernel joins the parts of longer sequences (flash-decoding, split-KV), so that
few of these occupy a GPU too. Parts have the same borders and order whatever else is in the batch, so a
sequence's numbers do not depend on its company. A tile of a prompt's rows is one program for a few of a
group's heads, which reads all keys up to its last row. The plain twin gathers (`attention/batched.py`);
`reference.attention` is what both equal.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.attention import AttentionSpec
from coserve.kernels.row_tiles import LARGEST, RowTiles

_KEYS: Final = 64  # positions at a time
# Positions of one program. Of 8 groups a sequence of 8,192 tokens is 128 programs, about a GPU's processors;
# what a part writes is a 64th of what it reads (4 heads a group, bfloat16).
_SPLIT: Final = 512
_LEAST: Final = 16  # of each side of a product by matrix units
_HEADS: Final = 4  # of a tile's program: 64 queries with its 16 rows
_WIDE: Final = 128  # numbers of a key or value; of wider ones half as many heads, for the shared memory
_UNLIMITED: Final = 1 << 30  # positions of a window that hides none


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    spec: AttentionSpec,
    tiles: RowTiles | None = None,
) -> Tensor:
    """Attention of q [batch, heads, dk], one row for each sequence, over the first `lengths` [batch] tokens
    of its `pages` [batch, n] in keys [groups, slots, dk] and values [groups, slots, dv]; a page is
    `page_size` slots. Of rows in `tiles`, `pages` [lines, n] are a block table, and rows of no tile get
    zeros. Returns [batch, heads, dv]."""
    batch, heads, dk = q.shape
    groups, _, dv = values.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    share = heads // groups
    if tiles is None:
        out, count, most = q.new_empty(batch, heads, dv), batch, _block(share)
        splits = max(-(-pages.shape[1] * page_size // _SPLIT), 1)
        columns = lengths, lengths, lengths  # which nobody reads
    else:
        out, count, splits = q.new_zeros(batch, heads, dv), len(tiles.starts), 1
        most = min(int(triton.next_power_of_2(share)), _HEADS if max(dk, dv) <= _WIDE else _HEADS // 2)
        columns = tiles.starts, tiles.counts, tiles.lines
    sums, tops, totals = _parts(out, splits)
    sinks = q if spec.sinks is None else spec.sinks.contiguous()
    window = _UNLIMITED if spec.window is None else spec.window
    constants = {"DV": _block(dv), "KEYS": _KEYS, "SPLIT": _SPLIT, "SINKS": spec.sinks is not None}
    _attend[(count, groups * triton.cdiv(share, most), splits)](
        q, keys, values, sums, tops, totals, pages, lengths, *columns, sinks,
        q.stride(0), q.stride(1), keys.stride(0), values.stride(0), pages.stride(0),
        share, heads, page_size, dk, dv, spec.scale, window, spec.softcap or 0.0,
        ROWS=1 if tiles is None else LARGEST, HEADS=most, DK=_block(dk), WHOLE=splits == 1, **constants,
    )  # fmt: skip
    if splits > 1:
        _join[(batch, heads)](sums, tops, totals, out, lengths, splits, dv, window, **constants)
    return out


def _parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors that programs write: weighted sums [batch, heads, splits, dv], greatest scores and sums of
    weights [batch, heads, splits], in float32; of one part, the answer itself."""
    if splits == 1:
        return out, out, out
    batch, heads, dv = out.shape
    sums = out.new_empty(batch, heads, splits, dv, dtype=torch.float32)
    tops, totals = out.new_empty(2, batch, heads, splits, dtype=torch.float32)
    return sums, tops, totals


def _block(size: int) -> int:
    """The least side of a block that holds `size`."""
    return max(int(triton.next_power_of_2(size)), _LEAST)


@triton.jit
def _attend(
    q, keys, values, sums, tops, totals, pages, lengths, starts, counts, lines, sinks,
    q_batch, q_head, keys_group, values_group, pages_batch,
    share, heads, page_size, dk, dv, scale, window, softcap,
    ROWS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    if ROWS == 1:
        begun, line, count = tile, tile, 1
        shortest = tl.load(lengths + begun).to(tl.int32)
        longest = shortest
    else:
        begun, count = tl.load(starts + tile).to(tl.int64), tl.load(counts + tile).to(tl.int32)
        line = tl.load(lines + begun).to(tl.int64)
        shortest = tl.load(lengths + begun).to(tl.int32)
        longest = tl.where(count > 0, shortest + count - 1, 0)
    pieces = tl.cdiv(share, HEADS)  # programs that share a group
    group = (tl.program_id(1) // pieces).to(tl.int64)
    query, wide, deep = tl.arange(0, ROWS * HEADS), tl.arange(0, DK), tl.arange(0, DV)
    own = tl.program_id(1) % pieces * HEADS + query % HEADS
    head = group * share + own
    row = begun + query // HEADS
    is_head = (own < share) & (query // HEADS < count)
    queries = tl.load(
        q + row[:, None] * q_batch + head[:, None] * q_head + wide[None, :],
        mask=is_head[:, None] & (wide < dk)[None, :],
        other=0.0,
    )
    length = tl.load(lengths + row, mask=is_head, other=0).to(tl.int32)
    # A sink is a key without a value, which the first part has.
    top = tl.full((ROWS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS * HEADS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    found = tl.zeros((ROWS * HEADS, DV), tl.float32)
    first = tl.maximum(shortest - window, 0)
    begin, end = tl.maximum(first // KEYS * KEYS, split * SPLIT), longest
    if not WHOLE:
        end = tl.minimum(end, (split + 1) * SPLIT)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        is_seen = (position < longest) & (position >= first)
        page = tl.load(pages + line * pages_batch + position // page_size, mask=is_seen, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        key = tl.load(
            keys + group * keys_group + slot[None, :] * dk + wide[:, None],
            mask=is_seen[None, :] & (wide < dk)[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        behind = length[:, None] - position[None, :]  # positions from here to the row, both included
        scores = tl.where((behind > 0) & (behind <= window), scores, float("-inf"))
        greatest = tl.maximum(top, tl.max(scores, 1))
        known = tl.where(greatest > float("-inf"), greatest, 0.0)  # rows of a tile that have seen no key yet
        kept, weights = tl.exp(top - known), tl.exp(scores - known[:, None])
        top = greatest
        value = tl.load(
            values + group * values_group + slot[:, None] * dv + deep[None, :],
            mask=is_seen[:, None] & (deep < dv)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    at = row * heads + head
    is_stored = is_head[:, None] & (deep < dv)[None, :]
    if WHOLE:
        into = sums + at[:, None] * dv + deep[None, :]
        tl.store(into, (found / total[:, None]).to(sums.dtype.element_ty), mask=is_stored)
    else:
        part = at * tl.num_programs(2) + split
        tl.store(sums + part[:, None] * dv + deep[None, :], found, mask=is_stored)
        tl.store(tops + part, top, mask=is_head)
        tl.store(totals + part, total, mask=is_head)


@triton.jit
def _join(
    sums, tops, totals, out, lengths, splits, dv, window,
    DV: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    deep = tl.arange(0, DV)
    at = sequence * tl.num_programs(1) + head
    # Parts before the window have no keys, and no greatest score to compare with.
    begin = 0 if SINKS else tl.maximum(length - window, 0) // SPLIT
    top, total = float("-inf"), 0.0
    found = tl.zeros((DV,), tl.float32)
    for split in range(begin, tl.cdiv(length, SPLIT)):
        part = at * splits + split
        own = tl.load(tops + part)
        before, top = top, tl.maximum(top, own)
        kept, weight = tl.exp(before - top), tl.exp(own - top)
        total = total * kept + tl.load(totals + part) * weight
        found = found * kept + tl.load(sums + part * dv + deep, mask=deep < dv, other=0.0) * weight
    tl.store(out + at * dv + deep, (found / total).to(out.dtype.element_ty), mask=deep < dv)
