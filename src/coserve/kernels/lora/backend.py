"""LoRA backends: how the rows of a step are multiplied with the low-rank matrices of their own adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

W = TypeVar("W", contravariant=True)
Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]  # of all A [rank, in], and of all B [out, rank]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Matrices of several adapters at one linear: adapter i has a[i] [rank, in] and b[i] [out, rank], times
    scales[i]."""

    a: Sequence[Tensor]
    b: Sequence[Tensor]
    scales: Sequence[float]


class LoraBackend(Protocol[W]):
    """Multiplies rows by their adapters' matrices at one linear after the other. Whose the rows are is fixed;
    where the matrices lie is told by `weights`. Rows meet no other adapter's matrices, so what is not a
    number stays with its adapter."""

    def shrink(self, x: Tensor, weights: W) -> Any:
        """x [rows, in] by each row's own A, in a form of the backend's own."""
        ...

    def expand_(self, h: Any, weights: W, y: Tensor) -> None:
        """y [rows, out] += scale · h Bᵀ, in place: what `shrink` gave by each row's own B."""
        ...


class TrainingLoraBackend(LoraBackend[LoraWeights], Protocol):
    """A LoRA backend that goes back as well."""

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """Gradients of A and B, given grad [rows, out] of what came out. That of x [rows, in] is added to
        `grad_x`, where it is wanted."""
        ...


def or_zeros(found: Sequence[Tensor | None], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of matrices; zeros for those of adapters without rows."""
    pairs = zip(found, matrices, strict=True)
    return [torch.zeros_like(matrix) if own is None else own for own, matrix in pairs]
