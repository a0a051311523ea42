"""Capabilities of this CPU, and the row counts that suit a device."""

from functools import cache

import torch
from torch import Tensor

from coserve.core.row_buckets import EXACT, ONEDNN, RowBuckets


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
