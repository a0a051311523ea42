"""Backward of a window group through a decoder layer by compiled kernels, with autograd in attention alone.

Layers are those that `model.native_layer` recognises, in float32, for windows whose bypasses are low-rank
ones at the layer's linears. What no gradient needs is not computed: products of keys and values, which are
stored, and the layer's output. The plain twin is `backward.layer_gradients` through the layer's modules.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from coserve.adapters.activation import ActiveBypasses
from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import is_lora
from coserve.kernels.native import ops
from coserve.kernels.native.layer_back import LayerBack
from coserve.model.block import Block, Call
from coserve.model.native_layer import NativeLayer, rotary_tables
from coserve.model.placement import MOST_ROWS
from coserve.train.window import KV
from coserve.train.window_group import ReplayedRows

_Q, _K, _V, _OUT, _GATE, _UP, _DOWN = range(7)  # of `layer_parts.LINEARS`
_DTYPE: Final = torch.float32  # bfloat16 has not been run this way on a processor that multiplies it


class ReplayedLayer(NamedTuple):
    """A window group at a layer: its input x [1, rows, width] and other arguments, the gradient of its
    output, those from later windows for the rows' own keys and values, and earlier keys and values as leaves
    of a graph."""

    x: Tensor
    call: Call
    gradient: Tensor
    kv_grads: KV | None
    past: Sequence[Tensor]


def recognised(block: Block, windows: Sequence[tuple[Bypasses, Sequence[Tensor]]]) -> NativeLayer | None:
    """The block's kernels, if they take windows back that have these bypasses, and these parameters that
    train in the block; else None. Requires a visit of the block."""
    layer = block.shortcut
    if not isinstance(layer, NativeLayer) or layer.paths.dtype is not _DTYPE or layer.native() is None:
        return None
    return layer if all(_is_plain(block, layer.paths.linears, *window) for window in windows) else None


def _is_plain(block: Block, linears: Sequence[str], bypasses: Bypasses, leaves: Sequence[Tensor]) -> bool:
    """Tells whether the block's bypasses are low-rank ones at its linears, and their matrices are what trains
    there."""
    here = {path: bypass for path, bypass in bypasses.outputs.items() if block.holds(path)}
    lora = [bypass for path, bypass in here.items() if path in linears and is_lora(bypass)]
    matrices = [id(matrix) for bypass in lora for matrix in (bypass.a, bypass.b)]
    is_all = len(lora) == len(here) and not any(map(block.holds, bypasses.inputs))
    is_all &= not isinstance(bypasses, ActiveBypasses)  # a matrix would have several ranges of rows
    return is_all and sorted(matrices) == sorted(map(id, leaves))


@torch.no_grad()
def native_gradients(
    layer: NativeLayer,
    rows: ReplayedRows,
    given: ReplayedLayer,
    leaves: Sequence[Tensor],
    needs_input_grad: bool,
) -> list[Tensor] | None:
    """Gradients of `leaves`, the matrices of the rows' bypasses, of earlier keys and values, and of the input
    where it is needed. None where the kernels do not read what is given."""
    x, call, gradient, kv_grads, past = given
    tables = rotary_tables(call, x.shape[1], layer.width)
    if tables is None or not ops.takes(x, gradient, *tables):
        return None
    kernel, lora = layer.native(), rows.computed(layer.paths) if x.shape[1] <= MOST_ROWS else None
    way: LayerBack | _Products
    if kernel is None or lora is None:
        way = _Products(layer, rows, x, *tables)
    else:
        way = LayerBack(kernel, lora, x, *tables)
    rows.check()
    q = way.queries().requires_grad_()
    k, v = (own.detach().requires_grad_() for own in rows.own(layer.index))
    with torch.enable_grad():
        attended = rows.attend(layer.index, q, k, v, layer.spec)
    rows.check()
    of_attended, of_x = way.after(attended.detach().flatten(2), gradient)
    rows.check()
    of_q, of_k, of_v, *of_past = torch.autograd.grad(
        [attended], [q, k, v, *past], [of_attended.view(attended.shape)]
    )
    if kv_grads is not None:
        of_k, of_v = of_k + kv_grads[0], of_v + kv_grads[1]
    way.before(of_q, of_k, of_v, of_x if needs_input_grad else None)
    return [*(way.gradients[id(leaf)] for leaf in leaves), *of_past, *[of_x] * needs_input_grad]


class _Products:
    """As `LayerBack`, product by product: faster for many rows, and reads products that are kept."""

    def __init__(self, layer: NativeLayer, rows: ReplayedRows, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.gradients: dict[int, Tensor] = {}
        self._layer, self._rows, self._tables = layer, rows, (cos, sin)
        self._first, self._second = layer.norms
        self._x, self._entering = x, ops.rms_norm(x, *self._first)

    def queries(self) -> Tensor:
        """See `LayerBack`."""
        product = self._product(_Q, self._entering)
        heads = product.view(*product.shape[:2], -1, self._layer.width).transpose(1, 2)
        return ops.rotate(heads, *self._tables)

    def after(self, attended: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerBack`."""
        middle = self._product(_OUT, attended) + self._x
        normed = ops.rms_norm(middle, *self._second)
        gate, up = self._product(_GATE, normed), self._product(_UP, normed)
        of_gate, of_up = ops.silu_mul_back(self._back(_DOWN, ops.silu_mul(gate, up), grad), gate, up)
        of_normed = self._back(_GATE, normed, of_gate).add_(self._back(_UP, normed, of_up))
        of_middle = ops.rms_norm_back(of_normed, middle, *self._second).add_(grad)
        return self._back(_OUT, attended, of_middle), of_middle

    def before(self, of_q: Tensor, of_k: Tensor, of_v: Tensor, of_x: Tensor | None) -> None:
        """See `LayerBack`."""
        of_heads = ops.rotate_back(of_q, *self._tables), ops.rotate_back(of_k, *self._tables), of_v
        of_entering: Tensor | None = None
        for number, of in zip((_Q, _K, _V), of_heads, strict=True):
            grad = of.transpose(1, 2).flatten(2)
            if of_x is None:
                self._back_to_matrices(number, self._entering, grad, None)
            else:
                found = self._back(number, self._entering, grad)
                of_entering = found if of_entering is None else of_entering.add_(found)
        if of_x is not None and of_entering is not None:
            of_x += ops.rms_norm_back(of_entering, self._x, *self._first)

    def _product(self, number: int, x: Tensor) -> Tensor:
        return self._rows.linear(
            self._layer.paths.linears[number], self._layer.parts.linears[number].placement, x
        )

    def _back(self, number: int, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient for a linear's input x [1, rows, in], from that of its output."""
        of_x = self._layer.parts.linears[number].placement.backward(grad)
        self._back_to_matrices(number, x, grad, of_x)
        return of_x

    def _back_to_matrices(self, number: int, x: Tensor, grad: Tensor, of_x: Tensor | None) -> None:
        self.gradients |= self._rows.back_to_matrices(self._layer.paths.linears[number], x, grad, of_x)
