"""Decoder layers in fewer launches than their modules make: for rows of answers on a GPU.

A residual is added in the kernel of the norm behind it, rotary embedding writes keys and values into their
pages, and adapters in slots are added to neighbouring linears together. As in `native_layer.py` a layer is
recognised by experiment, bit for bit.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.core.sequence import Direction
from coserve.kernels import elementwise
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native.layer import Norm
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block, Call, Resident
from coserve.model.layer_experiment import LayerExperiment
from coserve.model.layer_parts import NORMS, LayerParts
from coserve.model.linear import FrozenLinear

_ROTARY: Final = "position_embeddings"  # the argument with both tables
# Modules that are not called, so that nothing may be added to what they give.
_SKIPPED: Final = (*NORMS, "self_attn", "mlp")


class FusedLayer:
    """A block's shortcut for rows of answers in pages."""

    def __init__(
        self,
        index: int,
        block: Block,
        cell: BatchCell,
        parts: LayerParts,
        norms: Sequence[Norm],
        width: int,
        spec: AttentionSpec,
    ) -> None:
        self.index, self.cell, self.spec = index, cell, spec
        self.norms, self.skipped = norms, tuple(f"{block.path}.{name}" for name in _SKIPPED)
        self._linears, self.width = parts.linears, width

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None for rows that are not answers' alone."""
        return through([self], hidden, call)

    def attend(self, normed: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The layer's attention, which is added to the residual, of its norm's output."""
        assert isinstance(self.cell.rows, FusedRows)
        products = self._siblings(self._linears[:3], normed)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.width).transpose(1, 2) for x in products)
        attended = self.cell.rows.attend_rotated(self.index, q, k, v, tables, self.spec)
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


def through(layers: Sequence[FusedLayer], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of layers that follow each other, whose rows have the same arguments."""
    rows, tables = layers[0].cell.rows, call[1].get(_ROTARY)
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


@torch.no_grad()
def find_fused_layers(base: Base) -> None:
    """Gives the blocks that are recognised their shortcut, and the chain one through several of them."""
    if not any(map(elementwise.takes, base.model.parameters())):
        return
    experiment: LayerExperiment | None = None
    for index, block in enumerate(base.chain):
        block.shortcut = None
        with block.visit(Direction.INFER):
            parts = LayerParts.of(block.module, elementwise.takes)
            if parts is not None and base.caches[index].reads is None and parts.join(base.caches[index]):
                experiment = experiment or LayerExperiment(base)
                block.shortcut = _recognised(experiment, base, index, parts)
    base.chain.shortcut = through_blocks


def through_blocks(blocks: Sequence[Block], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of blocks that follow each other and lie in memory, where all of them have their shortcut;
    else None."""
    found = [block.shortcut for block in blocks if isinstance(block.residence, Resident)]
    layers = [shortcut for shortcut in found if isinstance(shortcut, FusedLayer)]
    return through(layers, hidden, call) if len(layers) == len(blocks) else None


def _recognised(experiment: LayerExperiment, base: Base, index: int, parts: LayerParts) -> FusedLayer | None:
    """The layer's shortcut, if one gives what the layer gives."""
    block, width = base.chain.blocks[index], base.caches[index].key

    def candidates(spec: AttentionSpec) -> Iterator[tuple[FusedLayer, FusedLayer]]:
        for centred in parts.centred():
            layer = FusedLayer(index, block, base.cell, parts, parts.computed(centred), width, spec)
            yield layer, layer

    return experiment.find(index, block.run, candidates)
