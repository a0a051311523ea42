"""Rotary embedding of a pass's queries and keys, and its keys and values into their pages, in one launch.

Apart these are four, each of some 3 us for 32 decode rows, in every layer. The plain twin rotates
(`elementwise.rotate`) and then writes (`attention/store.py`); bits are the same.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8  # of a program


def rotate_into_pages(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Returns the rotated queries [rows, heads, dk] of q [1, heads, rows or more, dk], for as many rows as
    there are `slots` [rows]; the rows of k [1, groups, rows, dk], rotated, and of v [1, groups, rows, dv] go
    to their slots in keys [groups, all slots, dk] and values [groups, all slots, dv]. cos and sin are [1,
    rows, dk]. Slots that several rows have are nobody's."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin, rows = cos.contiguous(), sin.contiguous(), len(slots)
    (_, heads, _, width), (_, groups, _, deep) = q.shape, v.shape
    turned = q.new_empty(rows, heads, width)
    if rows:
        of_heads, of_groups = triton.cdiv(heads, _HEADS), triton.cdiv(groups, _HEADS)
        _rotate_into_pages[(rows, of_heads + 2 * of_groups)](
            q, k, v, cos, sin, turned, slots, keys, values,
            q.stride(2), q.stride(1), k.stride(2), k.stride(1), v.stride(2), v.stride(1),
            keys.stride(0), values.stride(0), heads, groups, width // 2, deep,
            HEADS=_HEADS, HALF=int(triton.next_power_of_2(width // 2)),
            DEEP=int(triton.next_power_of_2(deep)), enable_fp_fusion=False,
        )  # fmt: skip
    return turned


@triton.jit
def _rotate_into_pages(
    q, k, v, cos, sin, out, slots, keys, values,
    q_row, q_head, k_row, k_head, v_row, v_head, keys_group, values_group, heads, groups, half, deep,
    HEADS: tl.constexpr, HALF: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_heads, of_groups = tl.cdiv(heads, HEADS), tl.cdiv(groups, HEADS)
    slot = tl.load(slots + row).to(tl.int64)
    if part >= of_heads + of_groups:
        # The compiler wants one type of a name in both branches, so these have names of their own.
        group, number = (part - of_heads - of_groups) * HEADS + tl.arange(0, HEADS), tl.arange(0, DEEP)
        is_value = (group < groups)[:, None] & (number < deep)[None, :]
        of_group = group[:, None].to(tl.int64)
        value = tl.load(v + row * v_row + of_group * v_head + number[None, :], mask=is_value, other=0.0)
        tl.store(values + of_group * values_group + slot * deep + number[None, :], value, mask=is_value)
    else:
        is_query = part < of_heads
        head = tl.where(is_query, part, part - of_heads) * HEADS + tl.arange(0, HEADS)
        column = tl.arange(0, HALF)
        is_column = column < half
        is_there = (head < tl.where(is_query, heads, groups))[:, None] & is_column[None, :]
        wide = head[:, None].to(tl.int64)
        if is_query:
            before = q + row * q_row + wide * q_head + column[None, :]
            into = out + (row * heads + wide) * 2 * half + column[None, :]
        else:
            before = k + row * k_row + wide * k_head + column[None, :]
            into = keys + wide * keys_group + slot * 2 * half + column[None, :]
        one = tl.load(before, mask=is_there, other=0.0).to(tl.float32)
        other = tl.load(before + half, mask=is_there, other=0.0).to(tl.float32)
        table = row * 2 * half + column
        cos_one = tl.load(cos + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
        cos_other = tl.load(cos + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
        sin_one = tl.load(sin + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
        sin_other = tl.load(sin + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
        kind = out.dtype.element_ty
        # Each product is rounded before the sum, as torch's are.
        first = (one * cos_one).to(kind).to(tl.float32) + (-(other * sin_one)).to(kind).to(tl.float32)
        second = (other * cos_other).to(kind).to(tl.float32) + (one * sin_other).to(kind).to(tl.float32)
        tl.store(into, first.to(kind), mask=is_there)
        tl.store(into + half, second.to(kind), mask=is_there)
