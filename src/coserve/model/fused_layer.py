"""Decoder layers in fewer launches than their modules make: for rows of answers on a GPU.

A residual is added in the kernel of the norm behind it, rotary embedding writes keys and values into their
pages, and adapters in slots are added to neighbouring linears together. As in `native_layer.py` a layer is
recognised by experiment, bit for bit.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.attention.batched import UnrotatedRows
from coserve.kernels import elementwise
from coserve.kernels.attention import AttentionSpec
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Call
from coserve.model.layer_experiment import ROTARY, WholeLayer
from coserve.model.layer_parts import NORMS, LayerParts
from coserve.model.linear import FrozenLinear

# Modules that are not called, so that nothing may be added to what they give.
_SKIPPED: Final = (*NORMS, "self_attn", "mlp")


class FusedLayer(WholeLayer):
    """A block's shortcut for rows of answers in pages."""

    takes = staticmethod(elementwise.takes)

    def __init__(
        self, base: Base, index: int, parts: LayerParts, centred: tuple[bool, ...], spec: AttentionSpec
    ) -> None:
        super().__init__(base, index, parts, centred, spec)
        self.skipped = tuple(f"{base.chain.blocks[index].path}.{name}" for name in _SKIPPED)
        self._linears = parts.linears

    @staticmethod
    def through(layers: Sequence["FusedLayer"], hidden: Tensor, call: Call) -> Tensor | None:
        rows, tables = layers[0].cell.rows, call[1].get(ROTARY)
        if torch.is_grad_enabled() or not isinstance(rows, FusedRows) or not rows.in_pages or tables is None:
            return None
        if not elementwise.takes(hidden, *tables) or tables[0].shape != (1, hidden.shape[1], layers[0].width):
            return None
        if not rows.is_bare([path for layer in layers for path in layer.skipped]):
            return None
        weight, eps, centred = layers[0].norms[0]
        normed = elementwise.rms_norm(hidden, weight, eps, centred)
        for number, layer in enumerate(layers):
            hidden, normed = elementwise.add_rms_norm(hidden, layer.attend(normed, tables), *layer.norms[1])
            added = layer.feed_forward(normed)
            if number + 1 == len(layers):
                return hidden + added
            hidden, normed = elementwise.add_rms_norm(hidden, added, *layers[number + 1].norms[0])
        raise AssertionError("there is a layer")

    def attend(self, normed: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The layer's attention, which is added to the residual, of its norm's output."""
        assert isinstance(self.cell.rows, FusedRows)
        products = self._siblings(self._linears[:3], normed)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.width).transpose(1, 2) for x in products)
        attended = self.cell.rows.attend_rotated(self.index, UnrotatedRows(q, k, v, tables), self.spec)
        added: Tensor = self._linears[3](attended.flatten(2))
        return added

    def feed_forward(self, normed: Tensor) -> Tensor:
        """The layer's feed-forward part, which is added to the residual, of its norm's output."""
        gate, up = self._siblings(self._linears[4:6], normed)
        added: Tensor = self._linears[6](elementwise.silu_mul(gate, up))
        return added

    def _siblings(self, linears: Sequence[FrozenLinear], x: Tensor) -> list[Tensor]:
        """The outputs of linears that have the same input."""
        assert isinstance(self.cell.rows, FusedRows)
        paths, placements = [linear.path for linear in linears], [linear.placement for linear in linears]
        found = self.cell.rows.siblings(paths, placements, x)
        return [linear(x) for linear in linears] if found is None else found
