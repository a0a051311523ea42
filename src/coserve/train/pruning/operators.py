"""Operators for tracing only: each of a layer's frozen linears, and its attention, is one node."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("coserve::mark", mutates_args=())
def _mark(x: Tensor, name: str) -> Tensor:
    return x.clone()


@_mark.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("coserve::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for attention in a trace")


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("coserve::attend_back", mutates_args=())
def _attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("it stands for attention in a trace")


@_attend_back.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _MarkFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        marked: Tensor = _mark(x, name)
        return marked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _attend_back(grads[0], *ctx.saved_tensors)
        return dq, dk, dv


def mark(x: Tensor, name: str) -> Tensor:
    """x under a name that a trace of it shows."""
    marked: Tensor = _MarkFunction.apply(x, name)  # type: ignore[no-untyped-call]
    return marked


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention's output [1, heads, rows, dv] as one operator, which also gives the log-sum-exp."""
    out: Tensor = _Attend.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out
