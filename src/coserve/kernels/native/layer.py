"""Decode rows of a whole decoder layer in one call of `layer.c`.

Its plain twin is the layer's own module: norms, linears, rotary embedding, attention and activation by the
same kernels, in calls of their own.
"""

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coserve.kernels.native import ops
from coserve.kernels.native.lora import LoraRows


@dataclass(frozen=True, slots=True)
class DecodePages:
    """Places where decode rows write and read keys and values [groups, slots, width]: each row's slot in
    `slot_mapping` [batch], its pages in `block_table` [batch, n], its length with itself in `lengths`."""

    keys: Tensor
    values: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    lengths: Tensor
    page_size: int


class _Linear(Structure):
    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("segments", c_void_p),
        ("count", c_int64),
    ]


class _Layer(Structure):
    _fields_: ClassVar = [
        ("linears", _Linear * 7),
        ("norms", c_void_p * 2),
        ("sizes", c_int64 * 5),
        ("numbers", c_float * 3),
        ("centred", c_int * 2),
    ]


class _Pages(Structure):
    _fields_: ClassVar = [("addresses", c_void_p * 5), ("sizes", c_int64 * 4)]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed weight at `address` (of `ops.packed_address`), with so many outputs, and its bias [out].
    `lora` are low-rank bypasses of some of the rows."""

    address: int
    outputs: int
    bias: Tensor | None
    lora: LoraRows | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """As the arguments of `ops.rms_norm`."""

    weight: Tensor
    eps: float
    centred: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: `linears` are query, key, value, output, gate, up and down, `norms` stand before
    attention and before the gate; `width` is that of a head."""

    linears: Sequence[PackedLinear]
    norms: tuple[Norm, Norm]
    width: int
    scale: float
    window: int | None


def decode_layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, pages: DecodePages) -> Tensor:
    """The layer's output for x [1, rows, hidden], contiguous, with rotary tables [1, rows, width]. The first
    rows are those of `pages`; others are padding, and attend to nothing."""
    rows, hidden = x.shape[1:]
    y = torch.empty_like(x)
    first, second = layer.norms
    heads, groups = (layer.linears[i].outputs // layer.width for i in (0, 1))
    described = _Layer(
        (_Linear * 7)(*map(_described, layer.linears)),
        (c_void_p * 2)(first.weight.data_ptr(), second.weight.data_ptr()),
        (c_int64 * 5)(hidden, heads, groups, layer.width, layer.window or 0),
        (c_float * 3)(first.eps, second.eps, layer.scale),
        (c_int * 2)(first.centred, second.centred),
    )
    rest = (pages.slot_mapping, pages.block_table, pages.lengths)
    read = (pages.keys, pages.values, *(tensor.contiguous() for tensor in rest))
    batch, count = pages.block_table.shape
    sizes = (c_int64 * 4)(pages.keys.shape[1], count, pages.page_size, batch)
    where = _Pages((c_void_p * 5)(*(tensor.data_ptr() for tensor in read)), sizes)
    cos, sin = cos.contiguous(), sin.contiguous()
    ops.loaded().decode_layer(
        byref(described), byref(where), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), rows,
        ops.GRAIN, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _described(one: PackedLinear) -> _Linear:
    added = (None, 0) if one.lora is None else (one.lora.address, one.lora.count)
    return _Linear(one.address, _address(one.bias), one.outputs, *added)


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()
