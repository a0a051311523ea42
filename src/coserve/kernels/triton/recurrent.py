"""Recurrent layers on a GPU: state updates for one row of each of some sequences, in one launch each. The
plain twins are in `kernels/recurrent.py`.

A state of 32 heads of 128 keys and 128 values is 2 MB. It is read once and written once, where a mixer's own
functions, between a copy from its place and one back, read or write all of it about a dozen times.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.kernels.recurrent import StatePlaces

_VALUES: Final = 32  # of a state's values or channels, of a program
_CHANNELS: Final = 256  # of a convolution, of a program
_MOST: Final = 1024  # keys of a head, or states of a channel
_WIDEST: Final = 16  # columns of a convolution


def takes(*tensors: Tensor) -> bool:
    """Tells whether kernels read these tensors, which need no graph."""
    return not torch.is_grad_enabled() and all(x.is_cuda and x.is_floating_point() for x in tensors)


def takes_conv(x: Tensor, weight: Tensor, bias: Tensor | None, places: StatePlaces) -> bool:
    """Tells whether `conv_update` reads these, arguments as there."""
    return (
        takes(x, weight, places.held, *([] if bias is None else [bias]))
        and places.held.shape[1:] == weight.shape
        and weight.shape[1] <= _WIDEST
    )


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool, places: StatePlaces
) -> Tensor:
    """See the twin. Sums are of float32, and rounded before SiLU."""
    rows, channels = x.shape
    x, y = x.contiguous(), x.new_empty(rows, channels)
    if rows:
        _conv_update[(rows, triton.cdiv(channels, _CHANNELS))](
            x, weight, x if bias is None else bias, places.held, places.before, places.after, y, channels,
            COLUMNS=weight.shape[1], BIAS=bias is not None, SILU=with_silu, CHANNELS=_CHANNELS,
        )  # fmt: skip
    return y


def takes_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, places: StatePlaces
) -> bool:
    """Tells whether `delta_update` reads these, arguments as there."""
    return takes(q, k, v, log_decay, beta, places.held) and k.shape[-1] <= _MOST


def delta_update(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, is_normed: bool, places: StatePlaces
) -> Tensor:
    """See the twin."""
    (rows, heads, values), (_, groups, keys) = v.shape, k.shape
    q, k, v, log_decay, beta = (x.contiguous() for x in (q, k, v, log_decay, beta))
    y = v.new_empty(rows, heads, values)
    if rows:
        _delta_update[(rows, heads, triton.cdiv(values, _VALUES))](
            q, k, v, log_decay, beta, places.held, places.before, places.after, y, keys**-0.5,
            heads, groups, keys, values, BY_KEY=log_decay.ndim == 3, NORMED=is_normed,
            KEYS=int(triton.next_power_of_2(keys)), VALUES=_VALUES,
        )  # fmt: skip
    return y


def takes_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, z: Tensor | None, places: StatePlaces
) -> bool:
    """Tells whether `selective_update` reads these, arguments as there."""
    return takes(x, dt, a, b, c, places.held, *([] if z is None else [z])) and b.shape[-1] <= _MOST


def selective_update(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    places: StatePlaces,
) -> Tensor:
    """See the twin. dt, a and d are in float32; a may be expanded."""
    (rows, heads, width), (groups, states) = x.shape, b.shape[1:]
    x, dt, b, c = (one.contiguous() for one in (x, dt, b, c))
    y, z = x.new_empty(rows, heads, width), None if z is None else z.contiguous()
    a = a.expand(heads, states)
    if rows:
        _selective_update[(rows, heads, triton.cdiv(width, _VALUES))](
            x, dt, a, b, c, dt if d is None else d, x if z is None else z,
            places.held, places.before, places.after, y, *a.stride(), heads, groups, width, states,
            ENDS=d is not None, GATED=z is not None, STATES=int(triton.next_power_of_2(states)),
            VALUES=min(_VALUES, int(triton.next_power_of_2(width))),
        )  # fmt: skip
    return y


@triton.jit
def _conv_update(
    x, weight, bias, held, before, after, y, channels,
    COLUMNS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_there = channel < channels
    old = held + tl.load(before + row) * channels * COLUMNS + channel * COLUMNS
    new = held + tl.load(after + row) * channels * COLUMNS + channel * COLUMNS
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for column in tl.static_range(COLUMNS):
        if column + 1 < COLUMNS:
            value = tl.load(old + column + 1, mask=is_there, other=0.0)
        else:
            value = tl.load(x + row * channels + channel, mask=is_there, other=0.0)
        value = value.to(held.dtype.element_ty)
        tl.store(new + column, value, mask=is_there)
        factor = tl.load(weight + channel * COLUMNS + column, mask=is_there, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=is_there, other=0.0).to(tl.float32)
    total = total.to(y.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(y + row * channels + channel, total.to(y.dtype.element_ty), mask=is_there)


@triton.jit
def _delta_update(
    q, k, v, log_decay, beta, held, before, after, y, scale, heads, groups, dk, dv,
    BY_KEY: tl.constexpr, NORMED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < dk, value < dv
    is_there = is_key[:, None] & is_value[None, :]
    of_head = row * heads + head
    shared = (row * groups + head // (heads // groups)) * dk + key
    one_q = tl.load(q + shared, mask=is_key, other=0.0).to(tl.float32)
    one_k = tl.load(k + shared, mask=is_key, other=0.0).to(tl.float32)
    if NORMED:
        one_q = one_q * tl.rsqrt(tl.sum(one_q * one_q, 0) + 1e-6)
        one_k = one_k * tl.rsqrt(tl.sum(one_k * one_k, 0) + 1e-6)
    if BY_KEY:
        decay = tl.load(log_decay + of_head * dk + key, mask=is_key, other=0.0).to(tl.float32)[:, None]
    else:
        decay = tl.load(log_decay + of_head).to(tl.float32)
    inside = key[:, None] * dv + value[None, :]
    old = held + (tl.load(before + row) * heads + head) * dk * dv + inside
    new = held + (tl.load(after + row) * heads + head) * dk * dv + inside
    state = tl.load(old, mask=is_there, other=0.0).to(tl.float32) * tl.exp(decay)
    wanted = tl.load(v + of_head * dv + value, mask=is_value, other=0.0).to(tl.float32)
    rate = tl.load(beta + of_head).to(tl.float32)
    learned = (wanted - tl.sum(state * one_k[:, None], 0)) * rate
    state += one_k[:, None] * learned[None, :]
    tl.store(new, state.to(held.dtype.element_ty), mask=is_there)
    found = tl.sum(state * one_q[:, None], 0) * scale
    tl.store(y + of_head * dv + value, found.to(y.dtype.element_ty), mask=is_value)


@triton.jit
def _selective_update(
    x, dt, a, b, c, d, z, held, before, after, y, a_head, a_state, heads, groups, width, states,
    ENDS: tl.constexpr, GATED: tl.constexpr, STATES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, channel = tl.arange(0, STATES), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_state, is_channel = place < states, channel < width
    is_there = is_channel[:, None] & is_state[None, :]
    of_head = row * heads + head
    shared = (row * groups + head // (heads // groups)) * states + place
    step = tl.load(dt + of_head).to(tl.float32)
    rate = tl.load(a + head * a_head + place * a_state, mask=is_state, other=0.0).to(tl.float32)
    one_b = tl.load(b + shared, mask=is_state, other=0.0).to(tl.float32)
    one_c = tl.load(c + shared, mask=is_state, other=0.0).to(tl.float32)
    given = tl.load(x + of_head * width + channel, mask=is_channel, other=0.0).to(tl.float32)
    inside = channel[:, None] * states + place[None, :]
    old = held + (tl.load(before + row) * heads + head) * width * states + inside
    new = held + (tl.load(after + row) * heads + head) * width * states + inside
    state = tl.load(old, mask=is_there, other=0.0).to(tl.float32) * tl.exp(step * rate)[None, :]
    state += (step * given)[:, None] * one_b[None, :]
    tl.store(new, state.to(held.dtype.element_ty), mask=is_there)
    found = tl.sum(state * one_c[None, :], 1)
    if ENDS:
        found += given * tl.load(d + head).to(tl.float32)
    if GATED:
        gate = tl.load(z + of_head * width + channel, mask=is_channel, other=0.0).to(tl.float32)
        found = found * gate / (1.0 + tl.exp(-gate))
    tl.store(y + of_head * width + channel, found.to(y.dtype.element_ty), mask=is_channel)
