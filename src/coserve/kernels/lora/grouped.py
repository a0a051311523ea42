"""Grouped: the rows of all adapters in one batch, split only for the low-rank products (the report's 4.3.3;
PEFT's mixed batches).

Two products for each segment, without copying matrices; a single adapter is one segment. The plain twins are
`reference.multi_lora` and `multi_lora_backward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraWeights, or_zeros


@dataclass(frozen=True, slots=True)
class Grouped:
    """Segments (rows, adapter), multiplied one by one; the intermediate of each is [its rows, rank]."""

    segments: tuple[tuple[slice, int], ...]

    def shrink(self, x: Tensor, weights: LoraWeights) -> list[Tensor]:
        """See `LoraBackend`."""
        return [x[rows] @ weights.a[owner].t() for rows, owner in self.segments]

    def expand_(self, h: Sequence[Tensor], weights: LoraWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        for own, (rows, owner) in zip(h, self.segments, strict=True):
            y[rows].addmm_(own, weights.b[owner].t(), alpha=weights.scales[owner])

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        of_a: list[Tensor | None] = [None] * len(weights.a)
        of_b: list[Tensor | None] = [None] * len(weights.b)
        for rows, owner in self.segments:
            a, b, scale = weights.a[owner], weights.b[owner], weights.scales[owner]
            own_grad, own_x = grad[rows], x[rows]
            between = (own_grad @ b).mul_(scale)
            if grad_x is not None:
                grad_x[rows].addmm_(between, a)
            _add(of_a, owner, between.t() @ own_x)
            _add(of_b, owner, own_grad.t() @ (own_x @ a.t()).mul_(scale))
        return or_zeros(of_a, weights.a), or_zeros(of_b, weights.b)


def _add(found: list[Tensor | None], owner: int, gradient: Tensor) -> None:
    before = found[owner]
    found[owner] = gradient if before is None else before + gradient
