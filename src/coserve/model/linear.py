"""Frozen linears: where each one runs is its placement's business, nobody else's.

A frozen linear's backward needs its weights and nothing else (`grad @ W`): it stores neither its input
nor its output. That is FlexLLM's pruning of frozen-weight gradients (5.2) at the smallest grain.
"""

from typing import Any

import torch
from torch import Tensor

from coserve.kernels.lora.segments import LoraSegments
from coserve.model.batch import BatchCell
from coserve.model.placement import Placed, Placement


class _Frozen(torch.autograd.Function):
    """A placement in a graph. `kept` [..., out] stands for the product where it is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, kept: Tensor | None) -> Tensor:
        ctx.placement = placement
        return placement.forward(x) if kept is None else kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.placement.backward(grads[0]), None, None


def frozen(x: Tensor, placement: Placement, kept: Tensor | None = None) -> Tensor:
    """The placement's product in the current graph, if there is one."""
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Frozen.apply(x, placement, kept)  # type: ignore[no-untyped-call]
        return y
    return placement.forward(x) if kept is None else kept


class _Bypassed(torch.autograd.Function):
    """A placement and low-rank bypasses beside it, in a graph: the gradient of what they are given comes of
    one product, to which those of the bypasses are added. `matrices` are those of the segments, A then B.
    Without a placement the bypasses are alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        placement: Placement | None,
        kept: Tensor | None,
        segments: LoraSegments,
        *matrices: Tensor,
    ) -> Tensor:
        ctx.placement, ctx.segments = placement, segments
        ctx.save_for_backward(x)
        y: Tensor = ctx.placement.forward(x) if kept is None else kept
        if segments.is_added:
            return y
        if kept is not None:
            y = y.clone()
        segments.add_(x.flatten(0, -2), y.flatten(0, -2))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = None
        if ctx.needs_input_grad[0]:
            found = x.new_zeros(x.shape) if ctx.placement is None else ctx.placement.backward(grad)
        grad_x = None if found is None else found.view(-1, x.shape[-1])
        of_a, of_b = ctx.segments.backward(grad.view(-1, grad.shape[-1]), x.flatten(0, -2), grad_x)
        return found, None, None, None, *of_a, *of_b


def bypassed(
    x: Tensor, placement: Placement | None, segments: LoraSegments, kept: Tensor | None = None
) -> Tensor:
    """The placement's product of x [..., in], or what was kept of it, with low-rank bypasses over its rows;
    in the current graph, which there is. Without a placement no gradient of x comes of `kept`."""
    weights = segments.weights
    y: Tensor = _Bypassed.apply(x, placement, kept, segments, *weights.a, *weights.b)  # type: ignore[no-untyped-call]
    return y


class FrozenLinear(Placed):
    """Stands where a linear of the base stood; `path` is that linear's name in the model.

    During a run the rows in the base's cell decide what else happens to the product: bypasses of
    adapters are added, and what training wants of it is kept.
    """

    def __init__(self, path: str, placement: Placement, shape: tuple[int, int], cell: BatchCell) -> None:
        super().__init__()
        self.path = path
        self.placement = placement
        self.out_features, self.in_features = shape
        self.cell = cell

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in]; model code asks a linear for its dtype or device now and then."""
        return self.placement.weight()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.cell.rows
        return frozen(x, self.placement) if rows is None else rows.linear(self.path, self.placement, x)

    def extra_repr(self) -> str:
        return f"{self.path}: {self.in_features} -> {self.out_features}, {type(self.placement).__name__}"
