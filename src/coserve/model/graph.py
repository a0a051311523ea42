"""Rows of one adapter in a graph."""

from typing import Any

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import is_plain
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.beside import Beside, Segment
from coserve.model.linear import Placement, bypassed, frozen


class GraphRows:
    """One window's rows in a graph, where everything but `bypasses` is frozen; nothing attends here."""

    def __init__(self, bypasses: Bypasses) -> None:
        self._bypasses = bypasses

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        entering = self._bypasses.inputs.get(path)
        if entering is not None:
            x2 = x.flatten(0, -2)
            x = entering.add(x2, x2).view(x.shape)
        kept, is_added = self._kept(path, x)
        bypass = self._bypasses.outputs.get(path)
        if is_plain(bypass) and torch.is_grad_enabled():
            rows = x.shape[:-1].numel()
            segment = Segment(0, rows, bypass.a, bypass.b, bypass.scale, is_added)
            return self._summed(path, bypassed(x, placement, Beside([segment], {}), kept))
        y = frozen(x, placement, kept)
        if bypass is not None:
            y = bypass.add(x.flatten(0, -2), y.flatten(0, -2)).view(y.shape)
        return self._summed(path, y)

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        bypass = self._bypasses.outputs.get(path)
        return y if bypass is None else bypass.add(x[0], y[0])[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise AssertionError("nothing attends outside of the layers")

    def _kept(self, path: str, x: Tensor) -> tuple[Tensor | None, bool]:
        """What stands for the product of x [..., in], so that it is not computed; and whether what a plain
        low-rank bypass adds is in it, or wanted by nobody."""
        return None, False

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
