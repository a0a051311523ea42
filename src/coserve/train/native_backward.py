"""Backward of a window group through a decoder layer by compiled kernels, with autograd in attention alone.

Layers are those that `model.native_layer` recognises, in float32, for windows whose bypasses are low-rank
ones at the layer's linears. What no gradient needs is not computed: products of keys and values, which are
stored, and the layer's output. The plain twin is `backward.layer_gradients` through the layer's modules.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import is_lora
from coserve.kernels.native import ops
from coserve.model.block import Block, Call
from coserve.model.native_layer import NativeLayer, rotary_tables
from coserve.train.window import KV
from coserve.train.window_group import ReplayedRows

_Q, _K, _V, _OUT, _GATE, _UP, _DOWN = range(7)  # of `layer_parts.LINEARS`
_DTYPE: Final = torch.float32  # bfloat16 has not been run this way on a processor that multiplies it


class Given(NamedTuple):
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
    if not isinstance(layer, NativeLayer) or layer.dtype is not _DTYPE or layer.native() is None:
        return None
    return layer if all(_is_plain(block, layer.paths.linears, *window) for window in windows) else None


def _is_plain(block: Block, linears: Sequence[str], bypasses: Bypasses, leaves: Sequence[Tensor]) -> bool:
    """Tells whether the block's bypasses are low-rank ones at its linears, and their matrices are what trains
    there."""
    here = {path: bypass for path, bypass in bypasses.outputs.items() if block.holds(path)}
    lora = [bypass for path, bypass in here.items() if path in linears and is_lora(bypass)]
    matrices = [id(matrix) for bypass in lora for matrix in (bypass.a, bypass.b)]
    is_all = len(lora) == len(here) and not any(map(block.holds, bypasses.inputs))
    return is_all and sorted(matrices) == sorted(map(id, leaves))


@torch.no_grad()
def native_gradients(
    layer: NativeLayer, rows: ReplayedRows, given: Given, leaves: Sequence[Tensor], needs_input_grad: bool
) -> list[Tensor] | None:
    """Gradients of `leaves`, the matrices of the rows' bypasses, of earlier keys and values, and of the input
    where it is needed. None where the kernels do not read what is given."""
    x, call, gradient, kv_grads, past = given
    tables = rotary_tables(call, x.shape[1], layer.width)
    if tables is None or not ops.takes(x, gradient, *tables):
        return None
    linears, (before, after) = _Linears(layer, rows), layer.norms
    entering = ops.rms_norm(x, *before)
    product = linears(_Q, entering)
    q = ops.rotate(product.unflatten(2, (-1, layer.width)).transpose(1, 2), *tables).requires_grad_()
    k, v = (own.detach().requires_grad_() for own in rows.own(layer.index))
    with torch.enable_grad():
        attended = rows.attend(layer.index, q, k, v, layer.spec)
    leaving = attended.detach().flatten(2)
    middle = linears(_OUT, leaving) + x
    normed = ops.rms_norm(middle, *after)
    gate, up = linears(_GATE, normed), linears(_UP, normed)

    of_gate, of_up = ops.silu_mul_back(linears.back(_DOWN, ops.silu_mul(gate, up), gradient), gate, up)
    of_normed = linears.back(_GATE, normed, of_gate).add_(linears.back(_UP, normed, of_up))
    of_middle = ops.rms_norm_back(of_normed, middle, *after).add_(gradient)
    of_attended = linears.back(_OUT, leaving, of_middle).view(attended.shape)
    of_q, of_k, of_v, *of_past = torch.autograd.grad([attended], [q, k, v, *past], [of_attended])
    if kv_grads is not None:
        of_k, of_v = of_k + kv_grads[0], of_v + kv_grads[1]
    of_heads = ops.rotate_back(of_q, *tables), ops.rotate_back(of_k, *tables), of_v
    of_products = [of.transpose(1, 2).flatten(2) for of in of_heads]
    if not needs_input_grad:
        for linear, of in enumerate(of_products):
            linears.back_to_matrices(linear, entering, of, None)
        return [*map(linears.gradient, leaves), *of_past]
    of_entering = linears.back(_Q, entering, of_products[_Q])
    for linear in (_K, _V):
        of_entering += linears.back(linear, entering, of_products[linear])
    of_x = ops.rms_norm_back(of_entering, x, *before).add_(of_middle)
    return [*map(linears.gradient, leaves), *of_past, of_x]


class _Linears:
    """A layer's linears with the bypasses of some rows, by their numbers, and the gradients of matrices."""

    def __init__(self, layer: NativeLayer, rows: ReplayedRows) -> None:
        self._paths, self._linears, self._rows = layer.paths.linears, layer.linears, rows
        self._gradients: dict[int, Tensor] = {}  # by the identity of the matrix

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """The output for x [1, rows, in]."""
        return self._rows.linear(self._paths[number], self._linears[number].placement, x)

    def back(self, number: int, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient for x, from that of the output [1, rows, out]."""
        of_x = self._linears[number].placement.backward(grad)
        self.back_to_matrices(number, x, grad, of_x)
        return of_x

    def back_to_matrices(self, number: int, x: Tensor, grad: Tensor, of_x: Tensor | None) -> None:
        """Takes the gradients of the bypasses' matrices, and adds that for x to `of_x` if there is one."""
        self._gradients |= self._rows.back_to_matrices(self._paths[number], x, grad, of_x)

    def gradient(self, matrix: Tensor) -> Tensor:
        """The gradient of a matrix, once all linears were taken back."""
        return self._gradients[id(matrix)]
