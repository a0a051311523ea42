"""Capabilities of this CPU, and the row counts that suit a device."""

import time
from functools import cache
from typing import Final

import torch
from torch import Tensor

from coserve.core.row_buckets import EXACT, ONEDNN, RowBuckets

_TRIES: Final = 7


@cache
def _has_bfloat16() -> bool:
    mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Tells whether products of this tensor run on a CPU's bfloat16 units."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and _has_bfloat16()


def row_buckets(device: torch.device) -> RowBuckets:
    """Row counts that steps on a device are padded to: oneDNN's on a CPU, any elsewhere."""
    return ONEDNN if device.type == "cpu" else EXACT


def choose_dtype() -> tuple[str, str]:
    """bfloat16 where this processor multiplies it faster than float32, measured on one small product; and
    words that say which and why."""
    single, half = _product_seconds(torch.float32), _product_seconds(torch.bfloat16)
    name = "bfloat16" if half < single else "float32"
    took = f"{half * 1e3:.2f} ms in bfloat16 and {single * 1e3:.2f} ms in float32"
    return name, f"in {name}, as one product of matrices took {took}"


@torch.no_grad()
def _product_seconds(dtype: torch.dtype) -> float:
    """The shortest of a few runs of one linear of the engine's usual size."""
    x, weight = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    taken = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        taken.append(time.perf_counter() - started)
    return min(taken)
