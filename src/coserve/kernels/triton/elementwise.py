"""Norms, rotary embedding and gated activation, forward and back, in one pass over memory each.

torch's own operations of a Llama's norm are seven kernels, each of which reads and writes all rows: of 8.4 ms
that a decode step of an 8B model took on an H200, 2.7 were such operations (docs/results/gpu.md). Numbers are
rounded where torch rounds between its operations, but for what stays inside a sum. The plain twins are the
models' own modules and autograd.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 1024  # numbers of a program of `silu_mul`
_HEADS: Final = 8  # of a program of `rotate`
_WIDEST: Final = 1 << 16  # of a row: one program holds it in registers
_NARROW: Final = 2048  # rows up to this width are a program of four warps


def fits(x: Tensor) -> bool:
    """Tells whether kernels can read this tensor's numbers."""
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.shape[-1] <= _WIDEST


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """As `native.ops.rms_norm`."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _rms_norm[(x.numel() // width,)](x, weight, y, width, eps, CENTRED=centred, **_row(width))
    return y


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The sum of x and y, and its `rms_norm`, in one launch."""
    x, y = x.contiguous(), y.contiguous()
    total, normed, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    if x.numel():
        _add_rms_norm[(x.numel() // width,)](
            x, y, weight, total, normed, width, eps, CENTRED=centred, **_row(width)
        )
    return total, normed


def rms_norm_back(grad: Tensor, x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """As `native.ops.rms_norm_back`."""
    grad, x = grad.contiguous(), x.contiguous()
    found, width = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _rms_norm_back[(x.numel() // width,)](
            grad, x, weight, found, width, eps, CENTRED=centred, **_row(width)
        )
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `native.ops.rotate`."""
    return _rotated(x, cos, sin, back=False)


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `native.ops.rotate_back`."""
    return _rotated(grad, cos, sin, back=True)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `native.ops.silu_mul`."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if y.numel():
        _silu_mul[(triton.cdiv(y.numel(), _BLOCK),)](gate, up, y, y.numel(), BLOCK=_BLOCK)
    return y


def silu_mul_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """As `native.ops.silu_mul_back`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), _BLOCK),)
        _silu_mul_back[grid](grad, gate, up, of_gate, of_up, gate.numel(), BLOCK=_BLOCK)
    return of_gate, of_up


def _row(width: int) -> dict[str, int]:
    """Constants of a kernel whose programs have a row each."""
    return {"BLOCK": int(triton.next_power_of_2(width)), "num_warps": 4 if width <= _NARROW else 8}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, heads, rows, width = x.shape
    y, cos, sin = x.new_empty(1, rows, heads, width), cos.contiguous(), sin.contiguous()
    if y.numel():
        half = int(triton.next_power_of_2(width // 2))
        _rotate[(rows, triton.cdiv(heads, _HEADS))](
            x, cos, sin, y, x.stride(2), x.stride(1), heads, width // 2,
            BACK=back, HEADS=_HEADS, HALF=half, enable_fp_fusion=False,
        )  # fmt: skip
    return y.transpose(1, 2)


@triton.jit
def _rms_norm(x, weight, y, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_there = column < width
    given = tl.load(x + at + column, mask=is_there, other=0.0).to(tl.float32)
    own = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    normed = given * tl.rsqrt(tl.sum(given * given, 0) / width + eps)
    if CENTRED:  # noqa: SIM108
        normed = normed * (1.0 + own)
    else:
        normed = normed.to(y.dtype.element_ty).to(tl.float32) * own
    tl.store(y + at + column, normed.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _add_rms_norm(x, y, weight, total, normed, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_there = column < width
    kind = total.dtype.element_ty
    first = tl.load(x + at + column, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(y + at + column, mask=is_there, other=0.0).to(tl.float32)
    rounded = (first + second).to(kind)  # as the sum that the next layers add to is
    tl.store(total + at + column, rounded, mask=is_there)
    given = rounded.to(tl.float32)
    own = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    scaled = given * tl.rsqrt(tl.sum(given * given, 0) / width + eps)
    if CENTRED:  # noqa: SIM108
        scaled = scaled * (1.0 + own)
    else:
        scaled = scaled.to(kind).to(tl.float32) * own
    tl.store(normed + at + column, scaled.to(kind), mask=is_there)


@triton.jit
def _rms_norm_back(grad, x, weight, found, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_there = column < width
    given = tl.load(x + at + column, mask=is_there, other=0.0).to(tl.float32)
    own = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    if CENTRED:
        own = 1.0 + own
    of_normed = tl.load(grad + at + column, mask=is_there, other=0.0).to(tl.float32) * own
    scale = tl.rsqrt(tl.sum(given * given, 0) / width + eps)
    mean = tl.sum(of_normed * given, 0) / width
    of_given = scale * (of_normed - given * (scale * scale * mean))
    tl.store(found + at + column, of_given.to(found.dtype.element_ty), mask=is_there)


@triton.jit
def _rotate(
    x, cos, sin, y, x_row, x_head, heads, half, BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    is_column = column < half
    is_there = (head < heads)[:, None] & is_column[None, :]
    before = x + row * x_row + head[:, None].to(tl.int64) * x_head + column[None, :]
    one = tl.load(before, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(before + half, mask=is_there, other=0.0).to(tl.float32)
    table = row * 2 * half + column
    cos_one = tl.load(cos + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cos_other = tl.load(cos + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_one = tl.load(sin + table, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_other = tl.load(sin + table + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    kind = y.dtype.element_ty
    if BACK:
        left, right = other * sin_other, -(one * sin_one)
    else:
        left, right = -(other * sin_one), one * sin_other
    # Each product is rounded before the sum, as torch's are.
    first = (one * cos_one).to(kind).to(tl.float32) + left.to(kind).to(tl.float32)
    second = (other * cos_other).to(kind).to(tl.float32) + right.to(kind).to(tl.float32)
    into = y + (row * heads + head[:, None]) * 2 * half + column[None, :]
    tl.store(into, first.to(kind), mask=is_there)
    tl.store(into + half, second.to(kind), mask=is_there)


@triton.jit
def _silu_mul(gate, up, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    given = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    kind = y.dtype.element_ty
    active = (given * tl.sigmoid(given)).to(kind).to(tl.float32)
    tl.store(y + at, (active * other).to(kind), mask=is_there)


@triton.jit
def _silu_mul_back(grad, gate, up, of_gate, of_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    of_y = tl.load(grad + at, mask=is_there, other=0.0).to(tl.float32)
    given = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    share = tl.sigmoid(given)
    kind = of_gate.dtype.element_ty
    slope = share * (1.0 + given * (1.0 - share))
    tl.store(of_gate + at, (of_y * other * slope).to(kind), mask=is_there)
    tl.store(of_up + at, (of_y * given * share).to(kind), mask=is_there)
