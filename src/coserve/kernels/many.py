"""Rows of many adapters in a graph: one function around whichever way multiplies them."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Way(Protocol):
    """Multiplies the rows of one layout with their adapters' matrices. Those lie end to end: A in
    [ranks, in], B transposed (and times its scale) in [ranks, out]. What lies between has a shape of the
    way's own."""

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        """x [rows, in] by each row's own ranks of a [ranks, in]."""
        ...

    def expand_(self, h: Tensor, b: Tensor, y: Tensor) -> None:
        """y [rows, out] += what `shrink` gave by each row's own ranks of b [ranks, out]."""
        ...

    def outer(self, h: Tensor, x: Tensor) -> Tensor:
        """[ranks, in]: what `shrink` gave, transposed, by x [rows, in], each adapter over its own rows."""
        ...


def add_(x: Tensor, y: Tensor, a: Tensor, b: Tensor, way: Way) -> None:
    """y [rows, out] += each row's own x Aᵀ B, in place; x [rows, in]."""
    way.expand_(way.shrink(x, a), b, y)


def add(x: Tensor, y: Tensor, a: Tensor, b: Tensor, way: Way) -> Tensor:
    """`add_` out of place, differentiable in x, y, a and b. The twins are `reference.multi_lora` and
    `multi_lora_backward`."""
    added: Tensor = _Added.apply(x, y, a, b, way)  # type: ignore[no-untyped-call]
    return added


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, way: Way) -> Tensor:
        h = way.shrink(x, a)
        ctx.way = way
        ctx.save_for_backward(x, a, b, h)
        out = y.clone()
        way.expand_(h, b, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, h = ctx.saved_tensors
        way: Way = ctx.way
        for_x, for_y, for_a, for_b, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        found_x = found_a = found_b = None
        if for_x or for_a:
            between = way.shrink(grad, b)
            if for_a:
                found_a = way.outer(between, x).to(a.dtype)
            if for_x:
                found_x = torch.zeros_like(x)
                way.expand_(between, a, found_x)
        if for_b:
            found_b = way.outer(h, grad).to(b.dtype)
        return found_x, grad if for_y else None, found_a, found_b, None
