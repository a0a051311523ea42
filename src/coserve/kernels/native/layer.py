"""Decode rows of whole decoder layers in one call of `layer.c`.

Its plain twin are the layers' own modules: norms, linears, rotary embedding, attention and activation by the
same kernels, in calls of their own.
"""

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.lora import LayerLora


class _Linear(Structure):
    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
    ]


class _Norm(Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_float), ("is_centred", c_int)]


class _Layer(Structure):
    _fields_: ClassVar = [
        ("linears", _Linear * 7),
        ("norms", _Norm * 2),
        ("sizes", c_int64 * 5),
        ("scale", c_float),
    ]


class _OwnWeight(Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("bias", c_void_p), ("begin", c_int64), ("end", c_int64)]


class _OwnRows(Structure):
    _fields_: ClassVar = [("weights", c_void_p), ("count", c_int64)]


class _Pages(Structure):
    _fields_: ClassVar = [("addresses", c_void_p * 2), ("sizes", c_int64 * 3)]


class DecodePages:
    """A pass's decode rows as the kernel reads them at `address`: each one's pages in `block_table` [batch,
    n], and its length with itself in `lengths` [batch]. Made once for all layers; holds the tensors."""

    def __init__(self, block_table: Tensor, lengths: Tensor, page_size: int) -> None:
        table, lengths = block_table.contiguous(), lengths.contiguous()
        self._tensors = table, lengths
        batch, count = table.shape
        addresses = (c_void_p * 2)(table.data_ptr(), lengths.data_ptr())
        self._described = _Pages(addresses, (c_int64 * 3)(count, page_size, batch))
        self.address = addressof(self._described)


class LayerPages(NamedTuple):
    """The rows' pages in some layers, with the keys and values [groups, slots, width] of each."""

    pages: DecodePages
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A packed weight at `address` (of `ops.packed_address`), with so many outputs, and its bias [out]."""

    address: int
    outputs: int
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Norm:
    """As the arguments of `ops.rms_norm`."""

    weight: Tensor
    eps: float
    centred: bool


class Layer:
    """A decoder layer as the kernel reads it at `address`, made once for as long as its tensors lie where
    they do.

    `linears` are query, key, value, output, gate, up and down; `norms` stand before attention and before the
    gate; `width` is that of a head.
    """

    def __init__(
        self,
        linears: Sequence[PackedLinear],
        norms: tuple[Norm, Norm],
        width: int,
        scale: float,
        window: int | None,
    ) -> None:
        self._tensors = linears, norms
        heads, groups = (linears[i].outputs // width for i in (0, 1))
        self._described = _Layer(
            (_Linear * 7)(*map(_described, linears)),
            (_Norm * 2)(*map(_described_norm, norms)),
            (c_int64 * 5)(len(norms[0].weight), heads, groups, width, window or 0),
            scale,
        )
        self.address = addressof(self._described)


class OwnWeight(NamedTuple):
    """A range of rows with a weight of their own: of a linear [out, in], which `ops.reads`, with its bias
    [out], in place of the layer's; of a norm [width] factors of the layer's output."""

    rows: slice
    weight: Tensor
    bias: Tensor | None = None


class LayerOwnWeights:
    """The weights that some rows have of their own at a layer's linears and norms, in their order, as the
    kernel reads them at `address`. The rows of each module are disjoint; holds the tensors."""

    def __init__(self, modules: Sequence[Sequence[OwnWeight]]) -> None:
        self._tensors = modules
        self._arrays = [_described_own(weights) for weights in modules]
        described = [_OwnRows(addressof(array), len(array)) for array in self._arrays]
        self._described = (_OwnRows * len(modules))(*described)
        self.address = addressof(self._described)


@cache
def no_own_weights(modules: int) -> LayerOwnWeights:
    """That no rows have any at so many modules."""
    return LayerOwnWeights([()] * modules)


def decode_layers(
    layers: Sequence[Layer],
    lora: Sequence[LayerLora],
    own: Sequence[LayerOwnWeights],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    where: LayerPages,
) -> Tensor:
    """The output of layers that follow each other for x [1, rows, hidden], contiguous, with rotary tables [1,
    rows, width], the bypasses at each layer's linears, and the weights that rows have of their own. The first
    rows are those of the pages; others are padding, and attend to nothing."""
    y = torch.empty_like(x)
    cos, sin = cos.contiguous(), sin.contiguous()
    addresses = c_void_p * len(layers)
    ops.loaded().decode_layers(
        addresses(*(layer.address for layer in layers)), addresses(*(added.address for added in lora)),
        addresses(*(weights.address for weights in own)), where.pages.address,
        addresses(*(keys.data_ptr() for keys in where.keys)),
        addresses(*(values.data_ptr() for values in where.values)), where.keys[0].shape[1], x.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), y.data_ptr(), x.shape[1], len(layers), ops.GRAIN,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def _described(one: PackedLinear) -> _Linear:
    return _Linear(one.address, _address(one.bias), one.outputs)


def _described_norm(one: Norm) -> _Norm:
    return _Norm(one.weight.data_ptr(), one.eps, one.centred)


def _described_own(weights: Sequence[OwnWeight]) -> "Array[_OwnWeight]":
    described = [
        _OwnWeight(one.weight.data_ptr(), _address(one.bias), one.rows.start, one.rows.stop)
        for one in sorted(weights, key=lambda one: one.rows.start)
    ]
    return (_OwnWeight * len(described))(*described)


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()
