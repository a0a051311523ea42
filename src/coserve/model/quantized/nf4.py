"""Four bits a weight: bitsandbytes' NF4, whose sixteen values are quantiles of a normal distribution.

Blocks of 64 weights share a scale, in bfloat16: 4.25 bits a weight. Only weights are rounded, so gradients
are those of the base with these weights (QLoRA).
"""

from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import exact_type
from coserve.model.placement import Placement, present, row_norms
from coserve.model.quantized.library import bitsandbytes

BLOCK: Final = 64  # weights of one output that share a scale
_TILE: Final = 32  # outputs that the product of few rows takes at a time on a CPU
_TYPE: Final = "nf4"
# Above as many rows it is quicker to widen the weights once. On two cores 1 / 16 / 64 / 256 rows of a
# 2816x1024 linear take 0.05 / 0.16 / 0.58 / 2.31 ms one way and 0.31 / 0.38 / 0.66 / 1.81 ms the other.
_FEW_ROWS: Final = 64
_PIECE: Final = 1 << 20  # weights rounded at a time: the library takes some twenty bytes for each


class NF4Placement(Placement):
    """A weight [out, in] in NF4, row after row, on any device. `in` must be a multiple of `BLOCK`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self._shape, self._dtype = tuple(weight.shape), weight.dtype
        self._keep(*_rounded(weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)

    def backward(self, grad: Tensor) -> Tensor:
        return grad @ self.weight()

    def weight(self) -> Tensor:
        return self._dense(self._dtype)

    def row_norms(self) -> Tensor:
        return row_norms(self._dense(exact_type(self._dtype)))

    def tensors(self) -> Mapping[str, Tensor]:
        return present(data=self._data, scales=self._scales, bias=self.bias)

    def rounded(self, weight: Tensor) -> Tensor:
        return type(self)(weight, None).weight()

    def _keep(self, data: Tensor, scales: Tensor) -> None:
        """data uint8 [out, in / 2], two weights a byte; scales bfloat16 [out, in / BLOCK]."""
        self._data, self._scales = data, scales

    def _kept(self) -> tuple[Tensor, Tensor]:
        """The packed weight as passed to `_keep`."""
        return self._data, self._scales

    def _dense(self, dtype: torch.dtype) -> Tensor:
        data, scales = self._kept()
        widen = torch.ops.bitsandbytes.dequantize_4bit
        dense: Tensor = widen(data, scales.float().flatten(), BLOCK, _TYPE, self._shape, _taken(dtype))
        return dense.to(dtype)


class TiledNF4Placement(NF4Placement):
    """An `NF4Placement` in the tiled layout of the CPU's product of few rows.

    That product dequantizes on the fly, which makes decode steps fast; for many rows and for gradients
    weights are untiled and dequantized first, a twentieth of such a product's time.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if rows > _FEW_ROWS:
            return super().forward(x)
        multiply = torch.ops.bitsandbytes.gemv_4bit
        x2 = x.reshape(rows, x.shape[-1])  # contiguous, as the library takes it to be
        y: Tensor = multiply(x2.contiguous(), self._data, self._shape, self._scales, _code(), BLOCK)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y.add_(self.bias)

    def _keep(self, data: Tensor, scales: Tensor) -> None:
        self._data, self._scales = tiled(data), scales.t().contiguous()

    def _kept(self) -> tuple[Tensor, Tensor]:
        return untiled(self._data), self._scales.t()


def place_in_nf4(weight: Tensor, bias: Tensor | None) -> NF4Placement:
    """The fastest NF4 placement for this weight [out, in] on its device. Raises ConfigError where the library
    is missing."""
    tiles = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[0] % _TILE == 0
    return TiledNF4Placement(weight, bias) if tiles and _multiplies_tiles() else NF4Placement(weight, bias)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """NF4 uint8 [out, in / 2] and scales bfloat16 [out, in / BLOCK]."""
    out, inputs = weight.shape
    data = torch.empty(out, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out, inputs // BLOCK, dtype=torch.bfloat16, device=weight.device)
    step = max(_PIECE // inputs, 1)
    cut = (torch.split(tensor, step) for tensor in (weight, data, scales))
    for some, into, by in zip(*cut, strict=True):
        given = some.to(_taken(weight.dtype)).contiguous()
        packed, state = bitsandbytes().quantize_4bit(given, blocksize=BLOCK, quant_type=_TYPE)
        into.copy_(packed.view(into.shape))
        by.copy_(state.absmax.view(by.shape))
    return data, scales


def tiled(data: Tensor) -> Tensor:
    """NF4 [out, in / 2] in tiles of 32 outputs. Within a tile, pairs of inputs are consecutive, and a byte
    holds one input of two outputs that are 16 apart."""
    out, pairs = data.shape
    low, high = data.view(-1, 2, _TILE // 2, pairs).to(torch.int16).unbind(1)  # outputs 0-15 and 16-31
    first = (high & 0xF0) | (low >> 4)  # of each pair of inputs
    second = ((high & 0x0F) << 4) | (low & 0x0F)
    pair = torch.stack([first, second], dim=-1).to(torch.uint8)
    return pair.transpose(1, 2).reshape(out, pairs)


def untiled(data: Tensor) -> Tensor:
    """Inverse of `tiled`. Processes both bytes of a pair as one 16-bit number."""
    out, pairs = data.shape
    both = data.view(torch.int16).view(-1, pairs, _TILE // 2).transpose(1, 2).contiguous()
    rows = torch.empty(len(both), 2, _TILE // 2, pairs, dtype=torch.uint8, device=data.device)
    rows[:, 0] = ((both & 0x0F) << 4).bitwise_or_((both >> 8) & 0x0F)
    rows[:, 1] = (both & 0xF0).bitwise_or_((both >> 12) & 0x0F)
    return rows.view(out, pairs)


def _taken(dtype: torch.dtype) -> torch.dtype:
    """The library's compute type for a base in `dtype`; it has no float64."""
    return torch.float32 if dtype == torch.float64 else dtype


@cache
def _code() -> Tensor:
    """The sixteen NF4 values, on the CPU."""
    code: Tensor = bitsandbytes().get_4bit_type(_TYPE, device="cpu")
    return code


@cache
def _multiplies_tiles() -> bool:
    """Tells whether the product of few rows runs on this CPU with this tile layout."""
    if not bitsandbytes().has_avx512bf16():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 2 * BLOCK, generator=generator).bfloat16() for n in (3, 2 * _TILE))
    placement = TiledNF4Placement(weight, None)
    wanted = F.linear(x, placement.weight())
    return bool(
        torch.allclose(placement.forward(x), wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))
    )
