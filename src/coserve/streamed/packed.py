"""Packed weights of oneDNN over memory that is not their own, so that they can be read from a file."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Shape, type and memory layout of a packed tensor, the last as oneDNN writes it down."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    descriptor: bytes

    @staticmethod
    def of(packed: Tensor) -> "PackedForm":
        written = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
        return PackedForm(tuple(packed.shape), packed.dtype, written.numpy().tobytes())

    def over(self, memory: Tensor) -> Tensor:
        """A packed tensor whose bytes are those of `memory` (uint8), which must outlive it. By the function
        through which torch's compiled models load theirs."""
        handle, library = ctypes.c_void_p(), _library()
        rank = len(self.shape)
        strides = torch.empty(self.shape, device="meta").stride()
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(rank), _numbers(self.shape), _numbers(strides),
            ctypes.c_int64(0), ctypes.c_int32(_code(self.dtype)),
            ctypes.c_int32(library.aoti_torch_device_type_cpu()), ctypes.c_int32(0), ctypes.byref(handle),
            ctypes.c_int32(library.aoti_torch_layout__mkldnn()), ctypes.c_char_p(self.descriptor),
            ctypes.c_int64(len(self.descriptor)),
        )  # fmt: skip
        if failed:
            raise RuntimeError("torch makes no packed tensor of this form")
        made: Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(handle))
        return made


@cache
def nothing(dtype: torch.dtype) -> Tensor:
    """A packed tensor that stands for one whose bytes are elsewhere."""
    return torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), None)  # type: ignore[no-any-return]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _code(dtype: torch.dtype) -> int:
    code: int = getattr(_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
    return code


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _capsule(handle: ctypes.c_void_p) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(handle, None, None)
