"""Attention of decode rows to pages, read where they are: nothing is gathered first.

Gathering pages reads and writes them before the products read them again, three times the bytes. One program
has the queries of one sequence in one group of heads, and passes `_SPLIT` positions of its pages once, as
flash attention does; a second kernel joins the parts of longer sequences (flash-decoding, split-KV), so that
few of these occupy a GPU too. Parts have the same borders and order whatever else is in the batch, so a
sequence's numbers do not depend on its company. The plain twin gathers (`attention/batched.py`);
`reference.attention` is what both equal.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.attention import AttentionSpec

_KEYS: Final = 64  # positions at a time
# Positions of one program. Of 8 groups a sequence of 8,192 tokens is 128 programs, about a GPU's processors;
# what a part writes is a 64th of what it reads (4 heads a group, bfloat16).
_SPLIT: Final = 512
_LEAST: Final = 16  # of each side of a product by matrix units
_UNLIMITED: Final = 1 << 30  # positions of a window that hides none


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    page_size: int,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of q [batch, heads, dk], one row for each sequence, over the first `lengths` [batch] tokens
    of its `pages` [batch, n] in keys [groups, slots, dk] and values [groups, slots, dv]; a page is
    `page_size` slots. Returns [batch, heads, dv]."""
    batch, heads, dk = q.shape
    groups, _, dv = values.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q.new_empty(batch, heads, dv)
    splits = max(-(-pages.shape[1] * page_size // _SPLIT), 1)
    sums, tops, totals = _parts(out, splits)
    sinks = q if spec.sinks is None else spec.sinks.contiguous()
    window = _UNLIMITED if spec.window is None else spec.window
    constants = {"DV": _block(dv), "KEYS": _KEYS, "SPLIT": _SPLIT, "SINKS": spec.sinks is not None}
    _attend[(batch, groups, splits)](
        q, keys, values, sums, tops, totals, pages, lengths, sinks,
        q.stride(0), q.stride(1), keys.stride(0), values.stride(0), pages.stride(0),
        heads // groups, page_size, dk, dv, spec.scale, window, spec.softcap or 0.0,
        HEADS=_block(heads // groups), DK=_block(dk), WHOLE=splits == 1, **constants,
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
    q, keys, values, sums, tops, totals, pages, lengths, sinks,
    q_batch, q_head, keys_group, values_group, pages_batch,
    share, page_size, dk, dv, scale, window, softcap,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    SINKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    sequence, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    own, wide, deep = tl.arange(0, HEADS), tl.arange(0, DK), tl.arange(0, DV)
    head = group * share + own
    is_head = own < share
    queries = tl.load(
        q + sequence * q_batch + head[:, None] * q_head + wide[None, :],
        mask=is_head[:, None] & (wide < dk)[None, :],
        other=0.0,
    )
    # A sink is a key without a value, which the first part has.
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    found = tl.zeros((HEADS, DV), tl.float32)
    first = tl.maximum(length - window, 0)
    begin = tl.maximum(first // KEYS * KEYS, split * SPLIT)
    for start in range(begin, tl.minimum(length, (split + 1) * SPLIT), KEYS):
        position = start + tl.arange(0, KEYS)
        is_seen = (position < length) & (position >= first)
        page = tl.load(pages + sequence * pages_batch + position // page_size, mask=is_seen, other=0)
        slot = page.to(tl.int64) * page_size + position % page_size
        key = tl.load(
            keys + group * keys_group + slot[None, :] * dk + wide[:, None],
            mask=is_seen[None, :] & (wide < dk)[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        before, top = top, tl.maximum(top, tl.max(scores, 1))
        kept, weights = tl.exp(before - top), tl.exp(scores - top[:, None])
        value = tl.load(
            values + group * values_group + slot[:, None] * dv + deep[None, :],
            mask=is_seen[:, None] & (deep < dv)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    at = sequence * share * tl.num_programs(1) + head
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
