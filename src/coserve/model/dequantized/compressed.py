"""compressed-tensors' forms of integers in int32 words and of four-bit floating point ("pack-quantized",
"nvfp4-pack-quantized", "mxfp4-pack-quantized"). Those of eight bits are `scaled.ScaledForm`'s."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.model.dequantized.form import Slice, split_suffix, unpacked
from coserve.model.dequantized.mxfp4 import e2m1
from coserve.model.dequantized.scaled import ScaledForm, scales_of, spread

_PARTS: Final = {
    ".weight_packed": "packed", ".weight_scale": "scale", ".weight_zero_point": "zero",
    ".weight_shape": "shape", ".weight_g_idx": "groups", ".weight_global_scale": "whole",
}  # fmt: skip


@dataclass(frozen=True)
class CompressedForm:
    """Packed [out, in * bits / 32] int32, or [out, in / 2] bytes of four-bit floating point; scales [out,
    groups], zeros [out * bits / 32, groups] int32. A number is saved as one that is half of all higher.
    `rest` reads weights that are not packed."""

    bits: int
    rest: ScaledForm
    packed: Collection[str]

    name = "compressed-tensors"

    def weight_of(self, name: str) -> tuple[str, str] | None:
        """Of weights that have a packed tensor."""
        found = split_suffix(name, _PARTS)
        if found is not None and found[0] in self.packed:
            return f"{found[0]}.weight", found[1]
        return self.rest.weight_of(name)

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """As saved, or twice the bytes."""
        if "packed" not in parts:
            return self.rest.shape_of(parts)
        if "shape" in parts:
            return [*map(int, parts["shape"][...].tolist())]
        *rows, half = parts["packed"].get_shape()
        return [*rows, 2 * half]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Numbers less their zero, times the scale of their group."""
        if "packed" not in parts:
            return self.rest.widen(parts, dtype)
        packed, scale = parts["packed"], scales_of(parts["scale"])
        if packed.dtype == torch.uint8:
            numbers = e2m1(packed)
            if "whole" in parts:  # a scale of the scales, by which they are divided
                scale = scale / parts["whole"].float()
            return (numbers * spread(scale, numbers)).to(dtype)
        out, inputs = map(int, parts["shape"].tolist())
        half = 1 << (self.bits - 1)
        if packed.shape != (out, -(-inputs * self.bits // 32)):
            raise ValueError("words hold all numbers of a row")
        numbers = (unpacked(packed, self.bits, 1)[:, :inputs] - half).float()
        zero = torch.zeros(())
        if "zero" in parts:
            zero = (unpacked(parts["zero"], self.bits, 0)[:out] - half).float()
        if (groups := parts.get("groups")) is not None and groups.min() >= 0:
            index = groups.long()
            scale, zero = scale[:, index], zero[:, index] if zero.ndim else zero
        elif zero.ndim:
            zero = spread(zero, numbers)
        return ((numbers - zero) * spread(scale, numbers)).to(dtype)
