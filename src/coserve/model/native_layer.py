"""Decoder layers that kernels compute: decode rows in one call for several layers, others in two for each.

A layer is recognised by experiment: the kernel and the layer's own module get the same random rows and pages
when a base is loaded, and have to give the same output and write the same keys and values, bit for bit.
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from coserve.adapters.lora_batch import LayerPaths
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.native import ops
from coserve.kernels.native.layer import Layer, PackedLinear, decode_layers, layer_begin, layer_end
from coserve.model.base import Base
from coserve.model.batch import FusedRows
from coserve.model.block import Block, Call
from coserve.model.layer_experiment import ROTARY, WholeLayer
from coserve.model.layer_parts import LINEARS, NORMS, LayerParts
from coserve.model.placement import MOST_ROWS

_ENTERED: Final = ("self_attn.o_proj", "mlp.down_proj")  # linears whose input no other module reads
_SUBLAYERS: Final = ("self_attn", "mlp")
# Multiply-adds of a linear from which on oneDNN's product gains more than calls of the modules take: 0.26 ms
# a layer of 64 rows and 0.3 for each full fine-tune, 0.02 for LoRA (256x704, two cores). _WORK for each
# adapter whose bypasses modules apply one by one, and _CALLS times as many for the base.
_WORK, _CALLS = 1 << 26, 4


class NativeLayer(WholeLayer):
    """A block's shortcut for rows of answers: of the base, and of adapters that its kernel reads."""

    takes = staticmethod(ops.takes)

    def __init__(
        self, base: Base, index: int, parts: LayerParts, centred: tuple[bool, ...], spec: AttentionSpec
    ) -> None:
        super().__init__(base, index, parts, centred, spec)
        self.paths = _paths(base, base.chain.blocks[index])
        self._latest: tuple[PackedLinear, Layer] | None = None  # with the first of its linears

    @staticmethod
    def through(layers: Sequence["NativeLayer"], hidden: Tensor, call: Call) -> Tensor | None:
        first = layers[0]
        rows, count = first.cell.rows, hidden.shape[1]
        if not isinstance(rows, FusedRows) or hidden.dtype is not first.paths.dtype:
            return None
        if not all(are_few(count, layer.parts, rows.one_by_one) for layer in layers):
            return None
        tables = rotary_tables(call, count, first.width)
        if tables is None or not ops.takes(hidden, *tables) or not hidden.is_contiguous():
            return None
        cos, sin = tables
        native = [found for layer in layers if (found := layer.native()) is not None]
        adapters = [added for layer in layers if (added := rows.native(layer.paths)) is not None]
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

    def native(self) -> Layer | None:
        """The layer as kernels read it; None where they do not read its weights. Kept until these move: all
        tensors of a block do so together, and `Placement.native` is another object then."""
        first = self.parts.linears[0].placement.native
        if first is None:
            return None
        if self._latest is None or self._latest[0] is not first:
            layer = self.parts.layer(self.centred, self.width, self.spec.scale, self.spec.window)
            if layer is None:
                return None
            self._latest = first, layer
        return self._latest[1]


def are_few(rows: int, parts: LayerParts, adapters: int = 0) -> bool:
    """Tells whether kernels of whole layers are faster than the modules with so many rows, where modules
    apply the bypasses of so many adapters one by one."""
    up = parts.linear("mlp.up_proj")
    return rows <= MOST_ROWS or rows * up.in_features * up.out_features <= _WORK * (_CALLS + adapters)


def rotary_tables(call: Call, rows: int, width: int) -> tuple[Tensor, Tensor] | None:
    """The tables [1, rows, width] among a layer's arguments; None where kernels do not read them."""
    cos, sin = call[1].get(ROTARY, (None, None))
    if cos is None or not ops.takes(cos, sin) or not cos.shape == sin.shape == (1, rows, width):
        return None
    return cos, sin


def _paths(base: Base, block: Block) -> LayerPaths:
    linears, entered, norms, sublayers = (
        tuple(f"{block.path}.{name}" for name in names) for names in (LINEARS, _ENTERED, NORMS, _SUBLAYERS)
    )
    known = {*linears, *norms, *sublayers}
    others = tuple(path for path in base.sites if block.holds(path) and path not in known)
    return LayerPaths(linears, entered, norms, sublayers, others, base.dtype)
