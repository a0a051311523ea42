"""Decoder layers that kernels compute: decode rows in one call for several layers, others in two for each.

A layer is recognised by experiment: the kernel and the layer's own module get the same random rows and pages
when a base is loaded, and have to give the same output and write the same keys and values, bit for bit.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from coserve.adapters.lora_batch import LayerAdapters, LayerPaths
from coserve.core.sequence import Direction
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Layer, Norm, PackedLinear, decode_layers, layer_begin, layer_end
from coserve.model.base import Base
from coserve.model.batch import BatchCell, FusedRows
from coserve.model.block import Block, Call, Resident
from coserve.model.layer_experiment import LayerExperiment
from coserve.model.layer_parts import LINEARS, NORMS, LayerParts
from coserve.model.linear import FrozenLinear
from coserve.model.placement import MOST_ROWS

_ENTERED: Final = ("self_attn.o_proj", "mlp.down_proj")  # linears whose input no other module reads
_SUBLAYERS: Final = ("self_attn", "mlp")
# Multiply-adds of a linear from which on oneDNN's product gains more than calls of the modules take: 0.26 ms
# a layer of 64 rows and 0.3 for each full fine-tune, 0.02 for LoRA (256x704, two cores). _WORK for each
# adapter whose bypasses modules apply one by one, and _CALLS times as many for the base.
_WORK, _CALLS = 1 << 26, 4
_ROTARY: Final = "position_embeddings"  # the argument with both tables


class NativeLayer:
    """A block's shortcut for rows of answers: of the base, and of adapters that its kernel reads."""

    def __init__(
        self,
        index: int,
        cell: BatchCell,
        parts: LayerParts,
        centred: tuple[bool, ...],
        paths: LayerPaths,
        width: int,
        spec: AttentionSpec,
    ) -> None:
        self.index, self.cell, self.width, self.spec = index, cell, width, spec
        self.dtype = paths.dtype
        self.paths, self._parts, self._centred = paths, parts, centred
        self._latest: tuple[PackedLinear, Layer] | None = None  # with the first of its linears

    def __call__(self, hidden: Tensor, call: Call) -> Tensor | None:
        """The block's output for hidden [1, rows, width]; None where outputs are to be kept, or a row has
        something that kernels do not read."""
        return through([self], hidden, call)

    def takes(self, rows: int, adapters: int) -> bool:
        """Tells whether the kernel is faster than the modules with so many rows, where modules apply the
        bypasses of so many adapters one by one."""
        return are_few(rows, self._parts, adapters)

    def native(self) -> Layer | None:
        """The layer as kernels read it; None where they do not read its weights. Kept until these move: all
        tensors of a block do so together, and `Placement.native` is another object then."""
        first = self._parts.linears[0].placement.native
        if first is None:
            return None
        if self._latest is None or self._latest[0] is not first:
            layer = self._parts.layer(self._centred, self.width, self.spec.scale, self.spec.window)
            if layer is None:
                return None
            self._latest = first, layer
        return self._latest[1]

    @property
    def linears(self) -> Sequence[FrozenLinear]:
        """In the order of `LINEARS`."""
        return self._parts.linears

    @property
    def norms(self) -> tuple[Norm, ...]:
        """In the order of `NORMS`."""
        return self._parts.computed(self._centred)

    def adapters(self, rows: FusedRows) -> LayerAdapters | None:
        """The rows' bypasses in the layer; None where the kernel does not read one of them."""
        return rows.native(self.paths)


def through(layers: Sequence[NativeLayer], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of layers that follow each other, as `NativeLayer` gives one's."""
    first = layers[0]
    rows, count = first.cell.rows, hidden.shape[1]
    if not isinstance(rows, FusedRows) or hidden.dtype is not first.dtype:
        return None
    if not all(layer.takes(count, rows.one_by_one) for layer in layers):
        return None
    tables = rotary_tables(call, count, first.width)
    if tables is None or not ops.takes(hidden, *tables) or not hidden.is_contiguous():
        return None
    cos, sin = tables
    native = [found for layer in layers if (found := layer.native()) is not None]
    adapters = [added for layer in layers if (added := layer.adapters(rows)) is not None]
    if not len(native) == len(adapters) == len(layers):
        return None
    pages = rows.decode_pages([layer.index for layer in layers], native[0].attention.heads * first.width)
    if pages is not None:
        lora, own = [each.lora for each in adapters], [each.own for each in adapters]
        return decode_layers(native, lora, own, hidden, cos, sin, pages)
    for layer, kernel, added in zip(layers, native, adapters, strict=True):
        q, k, v = layer_begin(kernel, *added, hidden, cos, sin, rows.count)
        attended = rows.attend(layer.index, q, k, v, layer.spec)
        hidden = layer_end(kernel, *added, hidden, attended, rows.count)
    return hidden


def are_few(rows: int, parts: LayerParts, adapters: int = 0) -> bool:
    """Tells whether kernels of whole layers are faster than the modules with so many rows, where modules
    apply the bypasses of so many adapters one by one."""
    up = parts.linear("mlp.up_proj")
    return rows <= MOST_ROWS or rows * up.in_features * up.out_features <= _WORK * (_CALLS + adapters)


def rotary_tables(call: Call, rows: int, width: int) -> tuple[Tensor, Tensor] | None:
    """The tables [1, rows, width] among a layer's arguments; None where kernels do not read them."""
    cos, sin = call[1].get(_ROTARY, (None, None))
    if cos is None or not ops.takes(cos, sin) or not cos.shape == sin.shape == (1, rows, width):
        return None
    return cos, sin


@torch.no_grad()
def find_native_layers(base: Base) -> None:
    """Gives the blocks that are recognised their shortcut, and the chain one through several of them."""
    if not any(ops.takes(parameter) for parameter in base.model.parameters()):
        return
    experiment: LayerExperiment | None = None
    for index, block in enumerate(base.chain):
        block.shortcut = None
        with block.visit(Direction.INFER):
            parts = LayerParts.of(block.module)
            if parts is not None and base.caches[index].reads is None and parts.join(base.caches[index]):
                experiment = experiment or LayerExperiment(base)
                block.shortcut = _recognised(experiment, base, index, parts)
    base.chain.shortcut = through_blocks


def through_blocks(blocks: Sequence[Block], hidden: Tensor, call: Call) -> Tensor | None:
    """The output of blocks that follow each other and lie in memory, where all of them have their shortcut;
    else None."""
    found = [block.shortcut for block in blocks if isinstance(block.residence, Resident)]
    layers = [shortcut for shortcut in found if isinstance(shortcut, NativeLayer)]
    return through(layers, hidden, call) if len(layers) == len(blocks) else None


def _recognised(experiment: LayerExperiment, base: Base, index: int, parts: LayerParts) -> NativeLayer | None:
    """The layer's shortcut, if one gives what the layer gives."""
    block, width = base.chain.blocks[index], base.caches[index].key
    paths = _paths(base, block)

    def candidates(spec: AttentionSpec) -> Iterator[tuple[NativeLayer, NativeLayer]]:
        for centred in parts.centred():
            layer = NativeLayer(index, base.cell, parts, centred, paths, width, spec)
            yield layer, layer

    return experiment.find(index, block.run, candidates)


def _paths(base: Base, block: Block) -> LayerPaths:
    linears, entered, norms, sublayers = (
        tuple(f"{block.path}.{name}" for name in names) for names in (LINEARS, _ENTERED, NORMS, _SUBLAYERS)
    )
    known = {*linears, *norms, *sublayers}
    others = tuple(path for path in base.sites if block.holds(path) and path not in known)
    return LayerPaths(linears, entered, norms, sublayers, others, base.dtype)
