"""Attention of decode rows to pages, read where they are: nothing is gathered first.

Gathering pages reads and writes them before the products read them again, three times the bytes. One program
has the queries of one sequence in one group of heads, and passes its pages once, as flash attention does. The
plain twin gathers (`attention/batched.py`); `reference.attention` is what both equal.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.attention import AttentionSpec

_KEYS: Final = 64  # positions at a time
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
    sinks = q if spec.sinks is None else spec.sinks.contiguous()
    window = _UNLIMITED if spec.window is None else spec.window
    _attend[(batch, groups)](
        q, keys, values, out, pages, lengths, sinks,
        q.stride(0), q.stride(1), keys.stride(0), values.stride(0), pages.stride(0),
        heads // groups, page_size, dk, dv, spec.scale, window, spec.softcap or 0.0,
        _block(heads // groups), _block(dk), _block(dv), _KEYS, spec.sinks is not None,
    )  # fmt: skip
    return out


def _block(size: int) -> int:
    """The least side of a block that holds `size`."""
    return max(int(triton.next_power_of_2(size)), _LEAST)


@triton.jit
def _attend(
    q, keys, values, out, pages, lengths, sinks, q_batch, q_head, keys_group, values_group, pages_batch,
    share, page_size, dk, dv, scale, window, softcap,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    sequence, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence).to(tl.int32)
    own, wide, deep = tl.arange(0, HEADS), tl.arange(0, DK), tl.arange(0, DV)
    head = group * share + own
    is_head = own < share
    queries = tl.load(
        q + sequence * q_batch + head[:, None] * q_head + wide[None, :],
        mask=is_head[:, None] & (wide < dk)[None, :],
        other=0.0,
    )
    # A sink is a key without a value, which is seen first.
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        total += 1.0
    sums = tl.zeros((HEADS, DV), tl.float32)
    first = tl.maximum(length - window, 0)
    for start in range(first // KEYS * KEYS, length, KEYS):
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
        sums = sums * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    into = out + (sequence * share * tl.num_programs(1) + head[:, None]) * dv + deep[None, :]
    found = sums / total[:, None]
    tl.store(into, found.to(out.dtype.element_ty), mask=is_head[:, None] & (deep < dv)[None, :])
