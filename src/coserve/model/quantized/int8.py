"""Eight bits a weight: int8 with one scale for each output, the format of torch's own weight-only product.

Only weights are rounded, not activations. So a base in eight bits *is* a base with the rounded weights: its
gradients are exact, and adapters train through it as through any other.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import exact_type
from coserve.model.placement import Placement, present
from coserve.parallel.ranks import ALONE, Ranks

_LARGEST: Final = 127
# torch's product of few rows by int8 weights reads each weight once, as one byte. At 1 / 16 / 64 rows of a
# 2816x1024 linear on two cores it takes 0.04 / 0.30 / 1.18 ms; to widen the weights first and multiply in
# bfloat16 takes 0.26 / 0.34 / 0.63 ms.
_FEW_ROWS: Final = 16
_VECTOR: Final = 32  # inputs it reads at a time, and beyond the end of weights that have no multiple of it
_PIECE: Final = 1 << 23  # weights widened at a time: those of a large head would be a copy of it


class Int8Placement(Placement):
    """A weight [out, in] rounded to int8, and `scale` [out] in the base's type. Where `ranks` have some
    inputs each, scales are those of the whole weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: Ranks = ALONE) -> None:
        self.bias = bias
        self._weight, self._scale = _rounded(weight, ranks)
        fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        self._few_rows = _FEW_ROWS if fits and weight.shape[1] % _VECTOR == 0 else 0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        if rows <= self._few_rows:
            x2 = x.reshape(rows, x.shape[-1])
            few: Tensor = torch.ops.aten._weight_int8pack_mm(x2, self._weight, self._scale)
            y = few.view(*x.shape[:-1], -1)
        else:
            y = self._multiply(x).mul_(self._scale)
        return y if self.bias is None else y.add_(self.bias)

    def backward(self, grad: Tensor) -> Tensor:
        scaled = grad * self._scale
        parts = [scaled @ piece.to(grad.dtype) for piece in self._pieces(dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def weight(self) -> Tensor:
        dense: Tensor = self._weight * self._scale[:, None]
        return dense

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the dense weight: [..., in] for index [...]."""
        found: Tensor = self._weight[index] * self._scale[index][..., None]
        return found

    def row_norms(self) -> Tensor:
        exact = exact_type(self._scale.dtype)
        norms = [torch.linalg.vector_norm(piece.to(exact), dim=1) for piece in self._pieces(dim=0)]
        return torch.cat(norms) * self._scale.to(exact)

    def tensors(self) -> Mapping[str, Tensor]:
        return present(weight=self._weight, scale=self._scale, bias=self.bias)

    def rounded(self, weight: Tensor) -> Tensor:
        return type(self)(weight, None).weight()

    def _multiply(self, x: Tensor) -> Tensor:
        parts = [F.linear(x, piece.to(x.dtype)) for piece in self._pieces(dim=0)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _pieces(self, dim: int) -> Iterator[Tensor]:
        """The int8 weight in pieces along one dimension, exact in every floating type."""
        step = max(_PIECE // self._weight.shape[1 - dim], 1)
        yield from torch.split(self._weight, step, dim)


def _rounded(weight: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and scales [out]. Each row is scaled by its largest weight."""
    lowest, highest = torch.aminmax(weight, dim=1)
    largest = ranks.whole(torch.maximum(-lowest, highest)[None], 0).amax(0).to(exact_type(weight.dtype))
    tiny = torch.finfo(weight.dtype).tiny  # keeps a row of zeros
    scale = (largest / _LARGEST).clamp_min(tiny).to(weight.dtype)
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    step = max(_PIECE // weight.shape[1], 1)
    cut = (torch.split(tensor, step) for tensor in (weight, numbers, scale))
    for some, into, by in zip(*cut, strict=True):
        exact = some.to(largest.dtype) / by.to(largest.dtype)[:, None]
        into.copy_(exact.round_().clamp_(-_LARGEST, _LARGEST))
    return numbers, scale
