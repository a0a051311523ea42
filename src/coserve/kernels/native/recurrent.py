"""Recurrent layers on a CPU: the kernels of `recurrent.c`, each beside its plain twin in
`kernels/recurrent.py` (the gated norm's are the models' own modules)."""

from typing import Any, Final

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.build import NUMBERS, kernels
from coserve.kernels.recurrent import StatePlaces

_MOST: Final = 1024  # keys, values and states of a head; as in recurrent.c
_LANES: Final = 16  # multiples of values that have gradients: a register of AVX-512, or two of AVX2
_EVERY: Final = 16  # rows, between two states that are kept for their gradients


def takes_conv(x: Tensor, weight: Tensor, bias: Tensor | None, places: StatePlaces) -> bool:
    """Tells whether `conv_update` reads these, arguments as there."""
    tensors = (x, weight, places.held) if bias is None else (x, weight, places.held, bias)
    return ops.takes(*tensors) and weight.is_contiguous() and places.held.shape[1:] == weight.shape


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool, places: StatePlaces
) -> Tensor:
    """See the twin. Sums are rounded before SiLU."""
    rows, channels = x.shape
    y = x.new_empty(rows, channels)
    ops.loaded(x).conv_update(
        x.data_ptr(), x.stride(0), weight.data_ptr(), _address(bias), *_placed(places), y.data_ptr(), rows,
        channels, weight.shape[1], with_silu, ops.threads(rows * channels * weight.shape[1]),
    )  # fmt: skip
    return y


def takes_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, places: StatePlaces
) -> bool:
    """Tells whether `delta_update` reads these, arguments as there."""
    dense = all(x.stride(1) == x.shape[2] for x in (q, k, v))
    return ops.takes(q, k, v, beta) and dense and _holds(places, log_decay)


def delta_update(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, is_normed: bool, places: StatePlaces
) -> Tensor:
    """See the twin."""
    rows, heads, values = v.shape
    y, log_decay = v.new_empty(rows, heads, values), log_decay.contiguous()
    ops.loaded(v).delta_update(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0), log_decay.data_ptr(),
        beta.data_ptr(), beta.stride(0), *_placed(places), y.data_ptr(), rows, heads, *k.shape[1:], values,
        is_normed, ops.threads(v.numel() * k.shape[2]),
    )  # fmt: skip
    return y


def takes_rows(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> bool:
    """Tells whether `delta_rows` reads these, arguments as there. Unlike other kernels it has gradients."""
    floats = (log_decay,) if state is None else (log_decay, state)
    return (
        all(x.dtype is v.dtype and x.dtype in NUMBERS for x in (q, k, beta))
        and all(x.dtype is torch.float32 for x in floats)
        and all(type(x) is Tensor and x.is_cpu for x in (q, k, v, beta, *floats))
        and max(k.shape[-1], v.shape[-1]) <= _MOST
        and not (k.shape[-1] % 4 or v.shape[-1] % _LANES)
        and kernels(v.dtype) is not None
    )


def delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    is_normed: bool,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the twin."""
    return _rows((q, k, v, log_decay, beta), state, k.shape[-1] ** -0.5, is_normed, is_delta=True)


def selective_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the twin."""
    log_decay = a.float() * dt.float()
    held = None if state is None else state.transpose(2, 3)
    y, after = _rows((c, b, x, log_decay, dt), held, 1.0, is_normed=False, is_delta=False)
    return y, after.transpose(2, 3)


def _rows(
    numbers: tuple[Tensor, ...], state: Tensor | None, scale: float, is_normed: bool, is_delta: bool
) -> tuple[Tensor, Tensor]:
    given = (x.contiguous() for x in numbers)
    held = None if state is None else state.contiguous()
    y, after = _DeltaRows.apply(*given, held, (scale, is_normed, is_delta))  # type: ignore[no-untyped-call]
    return y, after


class _DeltaRows(torch.autograd.Function):
    """`delta_rows` and `selective_rows`, row by row on both ways. Of the states between rows every `_EVERY`th
    is kept for the way back, which computes the others again: 256 KiB of them for heads of 64 by 64, which
    stay in a core's second cache."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *numbers, state, kind = given
        _, k, v, log_decay, _ = numbers
        batch, rows, heads, values = v.shape
        sizes = batch, rows, heads, *k.shape[2:], values
        y, after = torch.empty_like(v), log_decay.new_empty(batch, heads, k.shape[3], values)
        kept = None
        if any(ctx.needs_input_grad):
            kept = after.new_empty(-(-rows // _EVERY), *after.shape)
        ops.loaded(v).delta_rows(
            *(x.data_ptr() for x in numbers), _address(state), after.data_ptr(), y.data_ptr(), _address(kept),
            _EVERY, *sizes, *kind, ops.threads(v.numel() * k.shape[3]),
        )  # fmt: skip
        ctx.save_for_backward(*numbers, kept)
        ctx.kind, ctx.has_state = kind, state is not None
        return y, after

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        of_y, of_after = gradients
        *numbers, kept = ctx.saved_tensors
        q, k, v, log_decay, beta = numbers
        batch, rows, heads, values = v.shape
        of_y, of_state = of_y.contiguous(), of_after.contiguous().clone()
        dq, dk = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k))
        dv, dg, dbeta = torch.empty_like(v), torch.empty_like(log_decay), torch.empty_like(log_decay)
        threads, size = ops.threads(v.numel() * k.shape[3]), k.shape[3] * values
        room = log_decay.new_empty(threads, (_EVERY + 1) * size + 2 * _EVERY * values)
        found = (of_state, dq, dk, dv, dg, dbeta, room)
        ops.loaded(v).delta_rows_back(
            *(x.data_ptr() for x in (*numbers, kept, of_y, *found)),
            _EVERY, batch, rows, heads, *k.shape[2:], values, *ctx.kind, threads,
        )  # fmt: skip
        of_numbers = dq.to(q.dtype), dk.to(k.dtype), dv, dg, dbeta.to(beta.dtype)
        return *of_numbers, of_state if ctx.has_state else None, None


def takes_selective(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, z: Tensor | None, places: StatePlaces
) -> bool:
    """Tells whether `selective_update` reads these, arguments as there."""
    tensors = (x, b, c) if z is None else (x, b, c, z)
    dense = all(y.shape[1] == 1 or y.stride(1) == y.shape[2] for y in tensors)
    return (
        all(y.dtype is x.dtype for y in tensors)
        and all(y.shape[2] == 1 or y.stride(2) == 1 for y in tensors)
        and ops.takes(x.flatten(1))
        and dense
        and _holds(places, dt, a)
    )


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
    y, dt = x.new_empty(rows, heads, width), dt.contiguous()
    ops.loaded(x).selective_update(
        x.data_ptr(), x.stride(0), dt.data_ptr(), a.data_ptr(), a.stride(0), a.stride(1), b.data_ptr(),
        b.stride(0), c.data_ptr(), c.stride(0), _address(d), _address(z), 0 if z is None else z.stride(0),
        *_placed(places), y.data_ptr(), rows, heads, groups, width, states, ops.threads(x.numel() * states),
    )  # fmt: skip
    return y


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, is_gated_first: bool
) -> Tensor:
    """x [..., width] over the root mean square of each of its `groups`, times weight [width] and silu(gate),
    gate of x's shape; the gate multiplies before the rest where it `is_gated_first`. Rounded as the norms of
    Mamba 2 and of gated delta networks are."""
    x, (rows, width) = x.contiguous(), (x.shape[:-1].numel(), x.shape[-1])
    gate = gate.reshape(rows, width)
    y = torch.empty_like(x)
    ops.loaded(x).rms_norm_gated(
        x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), y.data_ptr(), rows, groups,
        width // groups, eps, is_gated_first, ops.threads(x.numel()),
    )  # fmt: skip
    return y


def _holds(places: StatePlaces, *floats: Tensor) -> bool:
    """Tells whether states and these numbers are in float32, and not too many for a kernel."""
    held = places.held
    wide = all(x.dtype is torch.float32 and x.is_cpu for x in (held, *floats))
    return wide and held.is_contiguous() and max(held.shape[2:]) <= _MOST


def _placed(places: StatePlaces) -> tuple[int, int, int]:
    return places.held.data_ptr(), places.before.data_ptr(), places.after.data_ptr()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
