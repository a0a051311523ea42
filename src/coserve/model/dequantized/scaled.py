"""Numbers of eight bits with scales: one for a tensor, a row or a block (FP8 in its official forms, int8)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.model.dequantized.form import Slice, split_suffix

_EXPONENT_BIAS: Final = 127  # of E8M0, which holds powers of two alone
_SUFFIXES: Final = {"_scale_inv": "scale", "_scale": "scale", "_zero_point": "zero"}
_UNUSED: Final = ("input_scale", "input_zero_point", "activation_scale", ".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True)
class ScaledForm:
    """A weight [..., out, in] of eight bits and scales, each for an equal block of the last two dimensions,
    the last of which may be cut off; a scale for all of them has no dimensions, or is [1]. Whether they are
    called scales or their inverses, a number is multiplied by its scale. `block` is that of the
    configuration; without one, all blocks of a dimension are equal. `scaled` are the names of the weights
    that have scales in the files."""

    name: str
    scaled: Collection[str]
    block: tuple[int, int] | None = None

    def weight_of(self, name: str) -> tuple[str, str] | None:
        """Weights without scales are in the model's own type."""
        if name in self.scaled:
            return name, "numbers"
        found = split_suffix(name, _SUFFIXES)
        if found is not None and found[0] in self.scaled:
            return found
        return (name, "") if name.endswith(_UNUSED) else None

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """That of the numbers."""
        return parts["numbers"].get_shape()

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Numbers less their zero, times their scale."""
        numbers, scale = parts["numbers"].float(), scales_of(parts["scale"])
        if "zero" in parts:
            numbers = numbers - spread(parts["zero"].float(), numbers, self.block)
        return (numbers * spread(scale, numbers, self.block)).to(dtype)


def scaled_names(names: Collection[str]) -> frozenset[str]:
    """Names of weights that have scales beside them."""
    found = (split_suffix(name, _SUFFIXES) for name in names)
    return frozenset(owner[0] for owner in found if owner is not None).intersection(names)


def scales_of(stored: Tensor) -> Tensor:
    """Scales in float32. A byte is the exponent of a power of two (E8M0)."""
    return (stored.float() - _EXPONENT_BIAS).exp2() if stored.dtype == torch.uint8 else stored.float()


def spread(scales: Tensor, numbers: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Scales that can be multiplied with numbers [..., out, in]: one of each block, repeated for all of it.
    Raises ValueError for a count of them that makes no equal blocks."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.ndim < numbers.ndim:  # one for each row
        scales = scales.unsqueeze(-1)
    for dim in (-2, -1):
        count, size = scales.shape[dim], numbers.shape[dim]
        each = block[dim] if block is not None and count > 1 else -(-size // count)
        if -(-size // each) != count:
            raise ValueError(f"{count} scales are none for each {each} of {size} numbers")
        if each > 1 and count > 1:
            scales = scales.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scales
