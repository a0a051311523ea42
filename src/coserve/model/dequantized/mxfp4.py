"""MXFP4, the form of gpt-oss: E2M1 numbers in blocks of 32 with a power of two each (OCP Microscaling)."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from coserve.model.dequantized.form import Slice, split_suffix
from coserve.model.dequantized.scaled import scales_of

_PARTS: Final = {"_blocks": "blocks", "_scales": "scales"}
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign
E2M1: Final = (*_POSITIVE, *(-value for value in _POSITIVE))


class MXFP4Form:
    """Fused experts: blocks uint8 [experts, out, in / 32, 16], the lower half of a byte first, and scales
    uint8 [experts, out, in / 32]. transformers' experts have [experts, in, out]."""

    name = "MXFP4"

    def weight_of(self, name: str) -> tuple[str, str] | None:
        """Experts alone are quantized."""
        return split_suffix(name, _PARTS)

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """[experts, in, out]."""
        experts, out, blocks, half = parts["blocks"].get_shape()
        return [experts, blocks * half * 2, out]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """One expert after the other: all of a large layer's would take gigabytes in float32."""
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError("there is a scale for each block, and both are bytes")
        experts, out, count, half = blocks.shape
        weight = torch.empty(experts, count * half * 2, out, dtype=dtype)
        for into, own, by in zip(weight, blocks, scales, strict=True):
            into.copy_((e2m1(own) * scales_of(by)[..., None]).reshape(out, -1).t())
        return weight


def e2m1(packed: Tensor) -> Tensor:
    """The numbers [..., 2n] in bytes [..., n], two in each, in float32."""
    values = torch.tensor(E2M1)
    both = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    return values[both.int()]
