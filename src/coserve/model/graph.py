"""Rows of one or several adapters in an autograd graph."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from coserve.adapters.activation import parted
from coserve.adapters.bypass import Bypass, Bypasses
from coserve.adapters.lora_batch import LoraBatch
from coserve.adapters.lowrank import is_lora
from coserve.attention.states import Core
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.lora.segments import LoraSegments
from coserve.kernels.rows import concat_rows, split_rows
from coserve.model.group import GroupRows, Prepared
from coserve.model.linear import bypassed, frozen
from coserve.model.placement import Placement


class GraphRows(GroupRows):
    """Rows in a graph where everything but bypasses is frozen: the first `sizes[0]` rows have the bypasses
    `adapters[0]`, and so on for all rows. Has neither attention nor mixers."""

    def __init__(self, adapters: Sequence[Bypasses], sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self._entered: tuple[Tensor, type[Placement], Tensor] | None = None
        # Ranges of rows, each with its bypasses and with the place of its adapter among `adapters`.
        each = [parted(adapter, rows) for adapter, rows in zip(adapters, sizes, strict=True)]
        parts = [(count, own, place) for place, ranges in enumerate(each) for count, own in ranges]
        self._counts, self._adapters = [part[0] for part in parts], [part[1] for part in parts]
        self._places = [part[2] for part in parts]
        spans = (slice(*span) for span in pairwise(accumulate(self._counts, initial=0)))
        self._lora = LoraBatch(list(zip(spans, self._adapters, strict=True)))

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        entering = [adapter.inputs.get(path) for adapter in self._adapters]
        if any(bypass is not None for bypass in entering):
            x2 = x.flatten(0, -2)
            x = self._added(entering, x2, x2).view(x.shape)
        x = self._entering(placement, x)
        if placement.group is None:
            kept, segments = self._segments(path, x)
            y = frozen(x, placement, kept) if segments is None else bypassed(x, placement, segments, kept)
        else:
            y, added = self._ask(path, placement.group, x)
            y = y if added is None else y + added
        bypasses = [adapter.outputs.get(path) for adapter in self._adapters]
        others = [None if is_lora(bypass) else bypass for bypass in bypasses]
        if any(bypass is not None for bypass in others):
            y = self._added(others, x.flatten(0, -2), y.flatten(0, -2)).view(y.shape)
        return self._summed(path, self._completed(path, placement, y))

    def after(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        bypasses = [adapter.outputs.get(path) for adapter in self._adapters]
        if all(bypass is None for bypass in bypasses):
            return y
        return self._added(bypasses, x[0], y[0])[None]

    def changed(self, path: str) -> int:
        of_each = zip(self._counts, self._adapters, strict=True)
        return sum(count for count, own in of_each if path in own.outputs)

    @property
    def is_training(self) -> bool:
        return True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        raise AssertionError("nothing attends outside of the layers")

    def mix(self, core: Core) -> Tensor:
        raise AssertionError("no mixer runs outside of the layers")

    def _entering(self, placement: Placement, x: Tensor) -> Tensor:
        """As `Placement.entering`, once for consecutive linears with the same input: their gradients are
        added before they become whole."""
        if self._entered is None or self._entered[0] is not x or self._entered[1] is not type(placement):
            self._entered = x, type(placement), placement.entering(x)
        return self._entered[2]

    def _segments(self, path: str, x: Tensor) -> tuple[Tensor | None, LoraSegments | None]:
        """The stand-in for the frozen product of x [..., in] if any, and its low-rank bypasses."""
        kept, is_added = self._kept(path, x)
        if not any(is_added):
            return kept, self._lora.at(path)
        return kept, self._lora.segments(path, [is_added[place] for place in self._places])

    def _is_changed(self, path: str) -> bool:
        return any(path in adapter.inputs for adapter in self._adapters)

    def _prepared(self, path: str, x: Tensor, outputs: int) -> Prepared:
        kept, segments = self._segments(path, x)
        if segments is None:
            return kept, lambda: None
        zeros = x.new_zeros(()).expand(*x.shape[:-1], outputs)
        return kept, lambda: bypassed(x, None, segments, zeros)

    def _kept(self, path: str, x: Tensor) -> tuple[Tensor | None, Sequence[bool]]:
        """Returns the stand-in for the frozen product of x [..., in], which is then not computed, or None;
        and for each adapter whether its plain low-rank bypass is in the stand-in or not needed."""
        return None, [False] * len(self.sizes)

    def _completed(self, path: str, placement: Placement, y: Tensor) -> Tensor:
        """As `Placement.complete`, of the product with its bypasses."""
        return placement.complete(y)

    def _summed(self, path: str, y: Tensor) -> Tensor:
        """Returns the graph's stand-in for y [..., out], the product with its bypasses."""
        return y

    def _added(self, bypasses: Sequence[Bypass | None], x: Tensor, y: Tensor) -> Tensor:
        """y [rows, out] with each range's bypass over its rows of x [rows, in]."""
        of_each = zip(bypasses, split_rows(x, self._counts), split_rows(y, self._counts), strict=True)
        return concat_rows([y if bypass is None else bypass.add(x, y) for bypass, x, y in of_each])


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def stand_in(place: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes to `place`, a tensor of the same shape, if that is in a graph."""
    if torch.is_grad_enabled() and place.requires_grad:
        found: Tensor = _StandIn.apply(place, value)  # type: ignore[no-untyped-call]
        return found
    return value
