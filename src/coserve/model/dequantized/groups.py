"""Integers of four or eight bits in int32 words, with a scale and an offset for each group of inputs: AWQ
and GPTQ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.model.dequantized.form import Slice, split_suffix, unpacked

_PARTS: Final = {".qweight": "words", ".qzeros": "zeros", ".scales": "scales", ".g_idx": "groups"}
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the eight columns of it are


class _Groups:
    def weight_of(self, name: str) -> tuple[str, str] | None:
        """Linears alone are quantized."""
        found = split_suffix(name, _PARTS)
        return None if found is None else (f"{found[0]}.weight", found[1])


class AWQForm(_Groups):
    """AWQ's layout "gemm": words [in, out / 8] and zeros [groups, out / 8] of four bits, scales
    [groups, out]."""

    name = "AWQ"

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """[out, in]."""
        return [parts["scales"].get_shape()[1], parts["words"].get_shape()[0]]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[out, in]."""
        numbers, zeros = (_in_order(parts[name]) for name in ("words", "zeros"))
        scales = parts["scales"].float()
        each, left = divmod(len(numbers), len(scales))
        if left or zeros.shape != scales.shape:
            raise ValueError("there is a scale and a zero for each group and output")
        return ((numbers - _repeated(zeros, each)) * _repeated(scales, each)).to(dtype).t().contiguous()


@dataclass(frozen=True)
class GPTQForm(_Groups):
    """GPTQ: words [in * bits / 32, out], zeros [groups, out * bits / 32], scales [groups, out], and the
    group of each input [in], where inputs were sorted. `less` is what zeros were saved less by: 1 in the
    first format."""

    bits: int
    less: int

    name = "GPTQ"

    def shape_of(self, parts: Mapping[str, Slice]) -> list[int]:
        """[out, in]."""
        words, out = parts["words"].get_shape()
        return [out, words * 32 // self.bits]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[out, in]."""
        numbers, scales = unpacked(parts["words"], self.bits, 0), parts["scales"].float()
        zeros = unpacked(parts["zeros"], self.bits, 1)[:, : scales.shape[1]]
        zeros = (zeros + self.less) & ((1 << self.bits) - 1)
        if zeros.shape != scales.shape or numbers.shape[1] != scales.shape[1]:
            raise ValueError("there is a scale and a zero for each group and output")
        groups = parts.get("groups")
        if groups is None:
            each, left = divmod(len(numbers), len(scales))
            if left:
                raise ValueError("groups are equal")
            groups = torch.arange(len(numbers)) // each
        if groups.shape != (len(numbers),) or groups.min() < 0:
            raise ValueError("each input has a group")
        index = groups.long()
        return ((numbers - zeros[index]) * scales[index]).to(dtype).t().contiguous()


def _in_order(words: Tensor) -> Tensor:
    """Four-bit numbers [rows, 8n] in the order of their columns, of words [rows, n]."""
    rows, count = words.shape
    numbers = unpacked(words, 4, 1).view(rows, count, 8)
    return numbers[..., list(_AWQ_PLACES)].flatten(1)


def _repeated(of_groups: Tensor, each: int) -> Tensor:
    return of_groups.repeat_interleave(each, dim=0)
