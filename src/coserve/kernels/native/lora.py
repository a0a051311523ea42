"""Low-rank bypasses of a step's rows at one linear in one call of `lora.c`.

Its plain twin is `reference.multi_lora`.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from functools import cache
from typing import ClassVar, Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import LoraSegment
from coserve.kernels.native import ops
from coserve.kernels.native.build import library

_WIDE: Final = 32  # outputs that are computed together


class _Segment(Structure):
    _fields_: ClassVar = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("begin", c_int64),
        ("end", c_int64),
        ("rank", c_int64),
        ("scale", c_float),
    ]


class _Bypass(Structure):
    _fields_: ClassVar = [("segments", c_void_p), ("count", c_int64)]


class LoraRows:
    """Segments as the kernel reads them, at `address`, `count` of them. Keeps their matrices alive."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        described = [
            _Segment(one.a.data_ptr(), one.b.data_ptr(), one.start, one.stop, len(one.a), one.scale)
            for one in segments
        ]
        self.count = len(segments)
        self._array = (_Segment * self.count)(*described)
        self._segments = segments
        self.address = addressof(self._array)


class LayerLora:
    """The bypasses at some linears, in their order, as the kernel of a whole layer reads them at `address`;
    None where one has none."""

    def __init__(self, rows: Sequence[LoraRows | None]) -> None:
        self._rows = rows
        described = [_Bypass() if own is None else _Bypass(own.address, own.count) for own in rows]
        self._described = (_Bypass * len(rows))(*described)
        self.address = addressof(self._described)


@cache
def no_lora(linears: int) -> LayerLora:
    """That there is none at so many linears."""
    return LayerLora([None] * linears)


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether there is a kernel for matrices of this type on this device."""
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return False
    found = library()
    return found is not None and bool(found.panel_outputs())


def readable(segments: Sequence[LoraSegment]) -> LoraRows | None:
    """The segments for the kernel; None where it does not read one of them."""
    if not segments or not computes(segments[0].a.dtype, segments[0].a.device):
        return None
    if not all(len(one.b) % _WIDE == 0 and _is_dense(one.a) and _is_dense(one.b) for one in segments):
        return None
    return LoraRows(segments)


def add_lora(x: Tensor, rows: LoraRows, y: Tensor) -> None:
    """y [all rows, out] += scale · x Aᵀ Bᵀ, in place, for the rows of each segment; x [all rows, in]. Where
    `takes` holds for both, and y is contiguous."""
    work = len(x) * (x.shape[1] + y.shape[1])
    ops.loaded().add_lora(
        x.data_ptr(), x.stride(0), rows.address, rows.count, y.data_ptr(), x.shape[1], y.shape[1],
        ops.threads(work),
    )  # fmt: skip


def _is_dense(matrix: Tensor) -> bool:
    return ops.fits(matrix) and matrix.is_contiguous()
