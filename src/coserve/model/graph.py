"""Rows of one adapter in a graph."""

from typing import Any

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.kernels.attention import AttentionSpec
from coserve.model.linear import Placement, frozen


class GraphRows:
    """One window's rows in a graph, where everything but `bypasses` is frozen; nothing attends here."""

    def __init__(self, bypasses: Bypasses) -> None:
        self._bypasses = bypasses

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        entering = self._bypasses.inputs.get(path)
        if entering is not None:
            x2 = x.flatten(0, -2)
            x = entering.add(x2, x2).view(x.shape)
        y = frozen(x, placement, self._kept(path, x))
        bypass = self._bypasses.outputs.get(path)
        if bypass is not None:
            y = bypass.add(x.flatten(0, -2), y.flatten(0, -2)).view(y.shape)
        return self._summed(path, y)

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        bypass = self._bypasses.outputs.get(path)
        return y if bypass is None else bypass.add(x[0], y[0])[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise AssertionError("nothing attends outside of the layers")

    def _kept(self, path: str, x: Tensor) -> Tensor | None:
        """What stands for the product of x [..., in], so that it is not computed."""
        return None

    def _summed(self, path: str, y: Tensor) -> Tensor:
        """What stands for the product with its bypasses, in y's place of the graph."""
        return y


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def stand_in(place: Tensor, value: Tensor) -> Tensor:
    """`value` in the place that another tensor of its shape has in the graph, if there is one."""
    if torch.is_grad_enabled() and place.requires_grad:
        found: Tensor = _StandIn.apply(place, value)  # type: ignore[no-untyped-call]
        return found
    return value
