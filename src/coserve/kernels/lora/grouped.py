"""Grouped: the rows of all adapters in one batch, which is split only where an adapter is multiplied (the
report's 4.3.3; PEFT's mixed batches).

Two products for each segment, by matrices where they lie; one adapter alone is a group of one segment. The
plain twins are `reference.multi_lora` and `multi_lora_backward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraWeights
from coserve.kernels.lora.layout import Layout


@dataclass(frozen=True, slots=True)
class Grouped:
    """A layout, multiplied segment by segment; between the products each segment has [its rows, rank]."""

    layout: Layout

    def shrink(self, x: Tensor, weights: LoraWeights) -> list[Tensor]:
        """See `LoraBackend`."""
        return [x[rows] @ weights.a[owner].t() for rows, owner in self.layout.segments]

    def expand_(self, h: Sequence[Tensor], weights: LoraWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        for own, (rows, owner) in zip(h, self.layout.segments, strict=True):
            y[rows].addmm_(own, weights.b[owner].t(), alpha=weights.scales[owner])

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        of_a: dict[int, Tensor] = {}
        of_b: dict[int, Tensor] = {}
        for rows, owner in self.layout.segments:
            a, b, scale = weights.a[owner], weights.b[owner], weights.scales[owner]
            own_grad, own_x = grad[rows], x[rows]
            between = (own_grad @ b).mul_(scale)
            if grad_x is not None:
                grad_x[rows].addmm_(between, a)
            _add(of_a, owner, between.t() @ own_x)
            _add(of_b, owner, own_grad.t() @ (own_x @ a.t()).mul_(scale))
        return _of_all(of_a, weights.a), _of_all(of_b, weights.b)


ALONE: Final = Grouped(Layout((slice(None),), (0,), (slice(None),)))  # all rows are one adapter's


def _add(found: dict[int, Tensor], owner: int, gradient: Tensor) -> None:
    found[owner] = found[owner] + gradient if owner in found else gradient


def _of_all(found: dict[int, Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all matrices; zeros for adapters without rows."""
    return [found[i] if i in found else torch.zeros_like(matrix) for i, matrix in enumerate(matrices)]
