"""A decoder layer's way back in float32 in three calls of `layer_back.c`, with attention's between them.

The plain twin are the kernels of `ops.py` and products by torch, one after the other.
"""

from ctypes import Array, Structure, addressof, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.layer import LINEARS, Layer
from coserve.kernels.native.lora import LayerLora


class _Gradients(Structure):
    _fields_: ClassVar = [("of_a", c_void_p), ("of_b", c_void_p)]


class LayerBack:
    """The rows x [1, rows, hidden] of a layer with low-rank bypasses that `lora_back` takes, and
    rotary tables [1, rows, width]. `gradients` are those of the matrices, by their identity, once both
    halves were gone back through."""

    def __init__(self, layer: Layer, lora: LayerLora, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.gradients: dict[int, Tensor] = {}
        self._layer, self._lora, self._x = layer, lora, x.contiguous()
        self._tables = cos.contiguous(), sin.contiguous()
        self._arrays = [
            (self._empty([one.a for one in rows.segments]), self._empty([one.b for one in rows.segments]))
            for rows in lora.rows[:LINEARS]
        ]
        described = [_Gradients(*map(addressof, pair)) for pair in self._arrays]
        self._found = (_Gradients * LINEARS)(*described)

    def _empty(self, matrices: list[Tensor]) -> "Array[c_void_p]":
        """Room for gradients of these matrices: the addresses."""
        found = [torch.empty_like(matrix) for matrix in matrices]
        self.gradients |= {id(matrix): own for matrix, own in zip(matrices, found, strict=True)}
        return (c_void_p * len(found))(*(own.data_ptr() for own in found))

    def queries(self) -> Tensor:
        """The queries of attention, [1, heads, rows, width], rotated."""
        own, x, (cos, sin) = self._layer.attention, self._x, self._tables
        q = x.new_empty(1, x.shape[1], own.heads, own.width)
        ops.loaded(x).layer_queries(
            self._layer.address, self._lora.address, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            q.data_ptr(), x.shape[1], ops.GRAIN, torch.get_num_threads(),
        )  # fmt: skip
        return q.transpose(1, 2)

    def after(self, attended: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients for `attended` [1, rows, heads * width], and for x by the way beside attention, given
        that of the layer's output [1, rows, hidden]."""
        x, attended, grad = self._x, attended.contiguous(), grad.contiguous()
        of_attended, of_x = torch.empty_like(attended), torch.empty_like(x)
        ops.loaded(x).layer_back_after(
            self._layer.address, self._lora.address, x.data_ptr(), attended.data_ptr(), grad.data_ptr(),
            addressof(self._found), of_attended.data_ptr(), of_x.data_ptr(), x.shape[1], ops.GRAIN,
            torch.get_num_threads(),
        )  # fmt: skip
        return of_attended, of_x

    def before(self, of_q: Tensor, of_k: Tensor, of_v: Tensor, of_x: Tensor | None) -> None:
        """Adds to `of_x` [1, rows, hidden], where it is not None, the gradient for x by the way through
        attention, given those of rotated queries and keys, and values, [1, heads or groups, rows, width]."""
        x, (cos, sin) = self._x, self._tables
        of_q, of_k = (of if of.stride(-1) == 1 else of.contiguous() for of in (of_q, of_k))
        of_v = of_v.transpose(1, 2).contiguous()
        ops.loaded(x).layer_back_before(
            self._layer.address, self._lora.address, x.data_ptr(),
            of_q.data_ptr(), of_q.stride(2), of_q.stride(1), of_k.data_ptr(), of_k.stride(2), of_k.stride(1),
            of_v.data_ptr(), cos.data_ptr(), sin.data_ptr(), addressof(self._found),
            None if of_x is None else of_x.data_ptr(), x.shape[1], ops.GRAIN, torch.get_num_threads(),
        )  # fmt: skip
