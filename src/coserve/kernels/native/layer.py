"""Whole decoder layers in one call of `layer.c` for decode rows, in two with attention between for others.

The plain twin are the layers' own modules: norms, linears, rotary embedding, attention and activation by the
same kernels, in calls of their own.
"""

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.lora import LayerLora

LINEARS, NORMS, SUBLAYERS = 7, 2, 2  # of a layer


class _Linear(Structure):
    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
    ]


class _Norm(Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_float), ("is_centred", c_int)]


class _AttentionShape(Structure):
    _fields_: ClassVar = [("sizes", c_int64 * 4), ("scale", c_float)]


class _Layer(Structure):
    _fields_: ClassVar = [
        ("linears", _Linear * LINEARS),
        ("norms", _Norm * NORMS),
        ("hidden", c_int64),
        ("attention", _AttentionShape),
    ]


class _OwnWeight(Structure):
    _fields_: ClassVar = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_void_p),
        ("inputs", c_void_p),
        ("sizes", c_int64 * 2),
        ("begin", c_int64),
        ("end", c_int64),
        ("use", c_int64),
    ]


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
    """A weight of this type at `address`, with so many inputs and outputs, and its bias [out]: packed
    (`ops.packed_address`) in bfloat16, as it was loaded in float32."""

    address: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    bias: Tensor | None


class Norm(NamedTuple):
    """As the arguments of `ops.rms_norm`."""

    weight: Tensor
    eps: float
    centred: bool


class Attention(NamedTuple):
    """Heads of queries, groups of keys and values, the width of each, and as in `AttentionSpec`."""

    heads: int
    groups: int
    width: int
    scale: float
    window: int | None


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
        self.attention = Attention(heads, groups, width, scale, window)
        self.outputs = tuple(one.outputs for one in linears)
        self._described = _Layer(
            (_Linear * LINEARS)(*map(_described, linears)),
            (_Norm * NORMS)(*map(_described_norm, norms)),
            len(norms[0].weight),
            _described_attention(self.attention),
        )
        self.address = addressof(self._described)


class Use(IntEnum):
    """Ways in which rows use a weight of their own at a module."""

    REPLACES = 0  # a linear's [out, in], which `ops.reads`, with its bias [out]
    CHANGES = 1  # output += output · weight [out]
    ENTERS = 2  # input += input · weight [in]
    ADDS = 3  # output += weight [out]
    SCALES = 4  # output · weight [out]


class OwnWeight(NamedTuple):
    """A range of rows with a weight of their own at a module. One that replaces a linear's may have but some
    of its `outputs` and `inputs`, indices in int64; other outputs are zeros then."""

    rows: slice
    use: Use
    weight: Tensor
    bias: Tensor | None = None
    outputs: Tensor | None = None
    inputs: Tensor | None = None


class LayerOwnWeights:
    """The weights that some rows have of their own at a layer's linears and norms, in their order, as the
    kernel reads them at `address`. Rows of a module and use are disjoint; holds the tensors."""

    def __init__(self, modules: Sequence[Sequence[OwnWeight]]) -> None:
        self._tensors = modules
        self._arrays = [_described_own(weights) for weights in modules]
        described = [_OwnRows(addressof(array), len(array)) for array in self._arrays]
        self._described = (_OwnRows * len(modules))(*described)
        self.address = addressof(self._described)


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
    ops.loaded(x).decode_layers(
        addresses(*(layer.address for layer in layers)), addresses(*(added.address for added in lora)),
        addresses(*(weights.address for weights in own)), where.pages.address,
        addresses(*(keys.data_ptr() for keys in where.keys)),
        addresses(*(values.data_ptr() for values in where.values)), where.keys[0].shape[1], x.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), y.data_ptr(), x.shape[1], len(layers), ops.GRAIN,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def layer_begin(
    layer: Layer, lora: LayerLora, weights: LayerOwnWeights, x: Tensor, cos: Tensor, sin: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of a layer's attention: q [1, heads, rows, width], k and v [1, groups, rows, width], the
    first two rotated, of x [1, rows, hidden], as `decode_layers` has them. Rows from `count` on are
    padding."""
    rows, cos, sin = x.shape[1], cos.contiguous(), sin.contiguous()
    own = layer.attention
    q, k, v = (x.new_empty(rows, heads, own.width) for heads in (own.heads, own.groups, own.groups))
    ops.loaded(x).layer_begin(
        layer.address, lora.address, weights.address, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), rows, count, ops.GRAIN, torch.get_num_threads(),
    )  # fmt: skip
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def layer_end(
    layer: Layer, lora: LayerLora, own: LayerOwnWeights, x: Tensor, attended: Tensor, count: int
) -> Tensor:
    """The layer's output for x [1, rows, hidden], after `layer_begin`; `attended` [1, rows, heads, width] may
    be changed."""
    y, attended = torch.empty_like(x), attended.contiguous()
    ops.loaded(x).layer_end(
        layer.address, lora.address, own.address, x.data_ptr(), attended.data_ptr(), y.data_ptr(),
        x.shape[1], count, ops.GRAIN, torch.get_num_threads(),
    )  # fmt: skip
    return y


def layer_slice(layer: Layer, following: Layer | None, x: Tensor, attended: Tensor) -> list[Tensor]:
    """The layer's output [rows, hidden] for its input x and `attended` [rows, heads * width], both
    contiguous; and the products [rows, out] with which the attention of the layer that follows begins, not
    rotated."""
    y = torch.empty_like(x)
    products = [x.new_empty(len(x), outputs) for outputs in following.outputs[:3]] if following else []
    q, k, v = (tensor.data_ptr() for tensor in products) if following else (None, None, None)
    ops.loaded(x).layer_slice(
        layer.address, following.address if following else None, x.data_ptr(), attended.data_ptr(),
        y.data_ptr(), q, k, v, len(x), ops.GRAIN, torch.get_num_threads(),
    )  # fmt: skip
    return [y, *products]


def layer_attend(
    shape: Attention, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, where: LayerPages
) -> Tensor:
    """Attention of decode rows over their pages in one layer, to which keys and values are written, as
    `decode_layers` has it: [1, rows, heads * width] for products q [1, rows, heads * width], k and v [1,
    rows, groups * width], all contiguous."""
    attended, described = torch.empty_like(q), _described_attention(shape)
    (keys,), (values,) = where.keys, where.values
    cos, sin = cos.contiguous(), sin.contiguous()
    ops.loaded(q).layer_attend(
        addressof(described), where.pages.address, keys.data_ptr(), values.data_ptr(), keys.shape[1],
        q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), attended.data_ptr(),
        q.shape[1], ops.GRAIN, torch.get_num_threads(),
    )  # fmt: skip
    return attended


def _described_attention(own: Attention) -> _AttentionShape:
    return _AttentionShape((c_int64 * 4)(own.heads, own.groups, own.width, own.window or 0), own.scale)


def _described(one: PackedLinear) -> _Linear:
    return _Linear(one.address, _address(one.bias), one.outputs)


def _described_norm(one: Norm) -> _Norm:
    return _Norm(one.weight.data_ptr(), one.eps, one.centred)


def _described_own(weights: Sequence[OwnWeight]) -> "Array[_OwnWeight]":
    ordered = sorted(weights, key=lambda one: one.rows.start)
    return (_OwnWeight * len(ordered))(*map(_described_weight, ordered))


def _described_weight(one: OwnWeight) -> _OwnWeight:
    addresses = (_address(tensor) for tensor in (one.bias, one.outputs, one.inputs))
    sizes = (c_int64 * 2)(len(one.weight), one.weight.shape[-1])
    return _OwnWeight(one.weight.data_ptr(), *addresses, sizes, one.rows.start, one.rows.stop, one.use)


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()
