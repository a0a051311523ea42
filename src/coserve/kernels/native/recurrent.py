"""Recurrent layers on a CPU: the kernels of `recurrent.c`, `conv_rows.c` and `scan_rows.c`, each beside its
plain twin in `kernels/recurrent.py` (the gated norm's are the models' own modules)."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels.native import ops
from coserve.kernels.native.build import NUMBERS, kernels
from coserve.kernels.recurrent import StatePlaces

takes = ops.takes
_MOST: Final = 1024  # keys, values and states of a head; as in recurrent.c
_WIDEST: Final = 8  # columns of a convolution of several rows; as in conv_rows.c
_LANES: Final = 16  # multiples of values that have gradients: a register of AVX-512, or two of AVX2
_EVERY: Final = 16  # rows, between two states that are kept for their gradients
_SCANNED: Final = 256  # states of a channel; as in scan_rows.c, as are the channels of a block
_BLOCK: Final = 16


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


def takes_conv_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tells whether `conv_rows` reads these, arguments as there; weight and bias are frozen."""
    frozen = (weight,) if bias is None else (weight, bias)
    return (
        ops.fit(*frozen)
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype is weight.dtype
        and weight.is_contiguous()
        and weight.shape[1] <= _WIDEST
        and not any(one.requires_grad for one in frozen)
        and kernels(x.dtype) is not None
    )


def conv_rows(x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool) -> Tensor:
    """See the twin. Sums are rounded before SiLU. Of a row's channels, which lie side by side in what
    projections give, a register has several."""
    rows = x.mT if x.stride(1) == 1 else x.mT.contiguous()
    y: Tensor = _ConvRows.apply(rows, weight, bias, with_silu)  # type: ignore[no-untyped-call]
    return y.mT


class _ConvRows(torch.autograd.Function):
    """`conv_rows` of x [n, rows, channels], whose sums are computed again on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.with_silu = with_silu
        y = x.new_empty(x.shape)
        ops.loaded(x).conv_rows(
            x.data_ptr(), *x.stride()[:2], weight.data_ptr(), _address(bias), y.data_ptr(), *x.shape,
            weight.shape[1], with_silu, ops.threads(x.numel() * weight.shape[1]),
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x, weight, bias), grad = ctx.saved_tensors, gradients[0].contiguous()
        dx = torch.empty_like(grad)
        ops.loaded(x).conv_rows_back(
            x.data_ptr(), *x.stride()[:2], weight.data_ptr(), _address(bias), grad.data_ptr(), dx.data_ptr(),
            *x.shape, weight.shape[1], ctx.with_silu, ops.threads(x.numel() * weight.shape[1]),
        )  # fmt: skip
        return dx, None, None, None


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
        log_decay[0, 0].numel(), is_normed, ops.threads(v.numel() * k.shape[2]),
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
        sizes = batch, rows, heads, *k.shape[2:], values, log_decay[0, 0, 0].numel()
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
        dv, dg, dbeta = torch.empty_like(v), torch.empty_like(log_decay), log_decay.new_empty(beta.shape)
        threads, size = ops.threads(v.numel() * k.shape[3]), k.shape[3] * values
        room = log_decay.new_empty(threads, (_EVERY + 1) * size + 2 * _EVERY * values)
        found = (of_state, dq, dk, dv, dg, dbeta, room)
        ops.loaded(v).delta_rows_back(
            *(x.data_ptr() for x in (*numbers, kept, of_y, *found)),
            _EVERY, batch, rows, heads, *k.shape[2:], values, log_decay[0, 0, 0].numel(), *ctx.kind, threads,
        )  # fmt: skip
        of_numbers = dq.to(q.dtype), dk.to(k.dtype), dv, dg, dbeta.to(beta.dtype)
        return *of_numbers, of_state if ctx.has_state else None, None


def takes_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> bool:
    """Tells whether `scan_rows` reads these, arguments as there; a is frozen."""
    floats = (dt, a) if state is None else (dt, a, state)
    return (
        all(one.dtype is x.dtype for one in (b, c))
        and all(one.dtype is torch.float32 for one in floats)
        and all(type(one) is Tensor and one.is_cpu for one in (x, b, c, *floats))
        and a.shape[1] <= _SCANNED
        and not a.requires_grad
        and kernels(x.dtype) is not None
    )


def scan_rows(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the twin. dt, a and states are in float32."""
    held = None if state is None else state.contiguous()
    given = (one.contiguous() for one in (x, dt, a, b, c))
    y, after = _ScanRows.apply(*given, held)  # type: ignore[no-untyped-call]
    return y, after


class _ScanRows(torch.autograd.Function):
    """`scan_rows`, of whose states between rows every `_EVERY`th is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *numbers, state = given
        x, _, a, _, _ = numbers
        y, after = torch.empty_like(x), a.new_empty(len(x), *a.shape)
        kept = after.new_empty(-(-x.shape[1] // _EVERY), *after.shape) if any(ctx.needs_input_grad) else None
        ops.loaded(x).scan_rows(
            *(one.data_ptr() for one in numbers), _address(state), after.data_ptr(), y.data_ptr(),
            _address(kept), _EVERY, *x.shape, a.shape[1], ops.threads(x.numel() * a.shape[1]),
        )  # fmt: skip
        ctx.save_for_backward(*numbers, kept)
        ctx.has_state = state is not None
        return y, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *numbers, kept = ctx.saved_tensors
        x, dt, a, b, _ = numbers
        of_y, of_state = gradients[0].contiguous(), gradients[1].contiguous().clone()
        parts = ops.threads(x.numel() * a.shape[1])
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        db, dc = (dt.new_zeros(parts, *b.shape) for _ in range(2))
        room = dt.new_empty(parts, (2 * _EVERY + 1) * _BLOCK * a.shape[1])
        ops.loaded(x).scan_rows_back(
            *(one.data_ptr() for one in (*numbers, kept, of_y, of_state, dx, ddt, db, dc, room)), _EVERY,
            *x.shape, a.shape[1], parts,
        )  # fmt: skip
        of_b, of_c = (one.sum(0).to(b.dtype) for one in (db, dc))
        return dx, ddt, None, of_b, of_c, of_state if ctx.has_state else None


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


def takes_gated(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Tells whether `rms_norm_gated` reads these, arguments as there."""
    return ops.fit(x, gate, weight) and not weight.requires_grad and kernels(x.dtype) is not None


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, is_gated_first: bool
) -> Tensor:
    """x [..., width] over the root mean square of each of its `groups`, times weight [width], which is
    frozen, and silu(gate), gate of x's shape; the gate multiplies before the rest where it `is_gated_first`.
    Rounded as the norms of Mamba 2 and of gated delta networks are. Has gradients."""
    kind = groups, eps, is_gated_first
    y: Tensor = _GatedNorm.apply(x.contiguous(), gate.reshape(-1, x.shape[-1]), weight, kind)  # type: ignore[no-untyped-call]
    return y


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, gate, weight, (groups, eps, is_gated_first) = given
        ctx.save_for_backward(x, gate, weight)
        ctx.kind = given[3]
        y, width = torch.empty_like(x), x.shape[-1]
        ops.loaded(x).rms_norm_gated(
            x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), y.data_ptr(), len(gate), groups,
            width // groups, eps, is_gated_first, ops.threads(x.numel()),
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, gate, weight), (groups, eps, is_gated_first) = ctx.saved_tensors, ctx.kind
        grad, dx, dgate = gradients[0].contiguous(), torch.empty_like(x), gate.new_empty(gate.shape)
        ops.loaded(x).rms_norm_gated_back(
            grad.data_ptr(), x.data_ptr(), gate.data_ptr(), gate.stride(0), weight.data_ptr(), dx.data_ptr(),
            dgate.data_ptr(), len(gate), groups, x.shape[-1] // groups, eps, is_gated_first,
            ops.threads(x.numel()),
        )  # fmt: skip
        return dx, dgate, None, None


def _holds(places: StatePlaces, *floats: Tensor) -> bool:
    """Tells whether states and these numbers are in float32, and not too many for a kernel."""
    held = places.held
    wide = all(x.dtype is torch.float32 and x.is_cpu for x in (held, *floats))
    return wide and held.is_contiguous() and max(held.shape[2:]) <= _MOST


def _placed(places: StatePlaces) -> tuple[int, int, int]:
    return places.held.data_ptr(), places.before.data_ptr(), places.after.data_ptr()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
