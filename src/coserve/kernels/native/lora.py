"""Low-rank bypasses of a step's rows at one linear in one call of `lora.c`.

Its plain twin is `reference.multi_lora`.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraSegment
from coserve.kernels.native import ops
from coserve.kernels.native.build import library

_WIDE: Final = 32  # outputs that are computed together
_ALIGNED: Final = 16  # inputs of `lora_back` are multiples of it
# Rank of `lora_back`. One thread, AVX2, a 704x256 linear, ms by it and by torch's products: of 32 rows 0.04
# and 0.11 in rank 8, 0.05 and 0.08 in 12, 0.13 and 0.10 in 32; of 256 rows 0.19 and 0.65, 0.29 and 0.45,
# 0.69 and 0.56.
_HIGHEST: Final = 12


class _Segment(Structure):
    _fields_: ClassVar = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("a_bias", c_void_p),
        ("b_bias", c_void_p),
        ("begin", c_int64),
        ("end", c_int64),
        ("rank", c_int64),
        ("scale", c_float),
        ("rectifies", c_int),
    ]


class _Bypass(Structure):
    _fields_: ClassVar = [("segments", c_void_p), ("count", c_int64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckSegment(LoraSegment):
    """Rows whose bypass has biases [rank] and [out], and a rectifier between its matrices."""

    a_bias: Tensor
    b_bias: Tensor


class LoraRows:
    """Segments as the kernel reads them, at `address`, `count` of them in matrices of `dtype`, None for none.
    Keeps their matrices alive."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        described = [_described(one) for one in segments]
        self.count = len(segments)
        self.dtype = segments[0].a.dtype if segments else None
        self._array = (_Segment * self.count)(*described)
        self.segments = segments
        self.address = addressof(self._array)

    @property
    def goes_back(self) -> bool:
        """Tells whether `lora_back` reads the matrices, and is faster than torch's products."""
        return self.dtype in (None, torch.float32) and all(map(_goes_back, self.segments))


NO_ROWS: Final = LoraRows(())


class LayerLora:
    """The bypasses at a layer's linears and sublayers, in their order, as its kernel reads them at
    `address`."""

    def __init__(self, rows: Sequence[LoraRows]) -> None:
        self.rows = rows
        described = [_Bypass(own.address, own.count) for own in rows]
        self._described = (_Bypass * len(rows))(*described)
        self.address = addressof(self._described)


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether there is a kernel for matrices of this type on this device."""
    found = library(dtype) if device.type == "cpu" else None
    return found is not None and bool(found.panel_outputs())


def readable(segments: Sequence[LoraSegment]) -> LoraRows | None:
    """The segments for the kernel; None where it does not read one of them."""
    if not segments or not computes(segments[0].a.dtype, segments[0].a.device):
        return None
    if not ops.fit(*(one.a for one in segments)) or not all(map(_is_readable, segments)):
        return None
    return LoraRows(segments)


def add_lora(x: Tensor, rows: LoraRows, y: Tensor) -> None:
    """y [all rows, out] += scale · x Aᵀ Bᵀ, in place, for the rows of each segment; x [all rows, in], which
    may be y. Where `takes` holds for both, and y is contiguous. A `BottleneckSegment` adds
    relu(x Aᵀ + a) Bᵀ + b."""
    work = len(x) * (x.shape[1] + y.shape[1])
    ops.loaded(y).add_lora(
        x.data_ptr(), x.stride(0), rows.address, rows.count, y.data_ptr(), x.shape[1], y.shape[1],
        ops.threads(work),
    )  # fmt: skip


def goes_back(x: Tensor, grad: Tensor, of_x: Tensor | None, rows: LoraRows) -> bool:
    """Tells whether `lora_back` takes these: in float32."""
    given = (x, grad) if of_x is None else (x, grad, of_x)
    return rows.goes_back and ops.takes(*given) and all(each.is_contiguous() for each in given[1:])


def lora_back(x: Tensor, grad: Tensor, rows: LoraRows, of_x: Tensor | None) -> Gradients:
    """Gradients of each segment's A and B, given x [all rows, in] and grad [all rows, out] of the output;
    that for x is added to `of_x` [all rows, in] unless it is None."""
    of_a, of_b = (
        [torch.empty_like(m) for m in of] for of in zip(*((s.a, s.b) for s in rows.segments), strict=True)
    )
    addresses = c_void_p * rows.count
    ops.loaded(x).lora_back(
        x.data_ptr(), x.stride(0), grad.data_ptr(), rows.address, rows.count,
        addresses(*(m.data_ptr() for m in of_a)), addresses(*(m.data_ptr() for m in of_b)),
        None if of_x is None else of_x.data_ptr(), x.shape[1], grad.shape[1],
        ops.threads(len(x) * (x.shape[1] + grad.shape[1])),
    )  # fmt: skip
    return of_a, of_b


def _is_readable(one: LoraSegment) -> bool:
    matrices = [one.a, one.b, *_biases(one)]
    return len(one.b) % _WIDE == 0 and ops.fit(*matrices) and all(each.is_contiguous() for each in matrices)


def _goes_back(one: LoraSegment) -> bool:
    rank, inputs = one.a.shape
    return rank <= _HIGHEST and not inputs % _ALIGNED and not isinstance(one, BottleneckSegment)


def _described(one: LoraSegment) -> _Segment:
    a_bias, b_bias = [bias.data_ptr() for bias in _biases(one)] or (None, None)
    return _Segment(
        one.a.data_ptr(), one.b.data_ptr(), a_bias, b_bias, one.start, one.stop, len(one.a), one.scale,
        isinstance(one, BottleneckSegment),
    )  # fmt: skip


def _biases(one: LoraSegment) -> list[Tensor]:
    return [one.a_bias, one.b_bias] if isinstance(one, BottleneckSegment) else []
