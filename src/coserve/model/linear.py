"""Frozen linears, computed by their placements.

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
    """A placement in a graph. `kept` [..., out] is the product if it was stored."""

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
    """A placement and its low-rank bypasses in a graph: the input's gradient is one product, to which the
    bypasses' gradients are added. `matrices` are those of the segments, A then B. Without a placement only
    the bypasses."""

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
        return _bypassed(x, placement, segments, kept)

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
    """The placement's product of x [..., in], or `kept`, with low-rank bypasses added, in the current graph
    if there is one. Without a placement `kept` gives x no gradient."""
    if not torch.is_grad_enabled():
        return _bypassed(x, placement, segments, kept)
    weights = segments.weights
    y: Tensor = _Bypassed.apply(x, placement, kept, segments, *weights.a, *weights.b)  # type: ignore[no-untyped-call]
    return y


def _bypassed(x: Tensor, placement: Placement | None, segments: LoraSegments, kept: Tensor | None) -> Tensor:
    y = kept
    if y is None:
        assert placement is not None
        y = placement.forward(x)
    if segments.is_added:
        return y
    if kept is not None:
        y = y.clone()
    segments.add_(x.flatten(0, -2), y.flatten(0, -2))
    return y


class FrozenLinear(Placed):
    """Replaces a linear of the base; `path` is its name in the model.

    During a run the rows in the base's cell add their adapters' bypasses to the product, and save what
    training needs.
    """

    def __init__(self, path: str, placement: Placement, shape: tuple[int, int], cell: BatchCell) -> None:
        super().__init__()
        self.path = path
        self.placement = placement
        self.out_features, self.in_features = shape
        self.cell = cell

    @property
    def weight(self) -> Tensor:
        """The dense weight [out, in]; model code sometimes reads its dtype or device."""
        return self.placement.weight()

    @property
    def bias(self) -> Tensor | None:
        """Bias [out], None where the linear has none; model code sometimes reads it."""
        return self.placement.tensors().get("bias")

    def forward(self, x: Tensor) -> Tensor:
        rows, own = self.cell.rows, self.placement
        return own.complete(frozen(own.entering(x), own)) if rows is None else rows.linear(self.path, own, x)

    def extra_repr(self) -> str:
        return f"{self.path}: {self.in_features} -> {self.out_features}, {type(self.placement).__name__}"
