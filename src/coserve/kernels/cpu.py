"""Capabilities of this CPU."""

from functools import cache

import torch
from torch import Tensor


@cache
def _has_bfloat16() -> bool:
    mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Tells whether products of this tensor run on a CPU's bfloat16 units."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and _has_bfloat16()
