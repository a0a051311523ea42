"""LoRA backends: products of a step's rows with the low-rank matrices of their adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Rows [start, stop) of an adapter with a [rank, in] and b [out, rank], times `scale`. `is_added`:
    forward has nothing to do, as the output includes the bypass."""

    start: int
    stop: int
    a: Tensor
    b: Tensor
    scale: float
    is_added: bool = False


class LoraBackend(Protocol[W]):
    """Multiplies rows by their adapters' matrices, for one linear after the other. The assignment of rows is
    fixed; `weights` has the matrices. Rows never meet other adapters' matrices, so a NaN stays with its
    adapter."""

    def shrink(self, x: Tensor, weights: W) -> Any:
        """x [rows, in] times each row's A, in a layout of the backend's own."""

    def expand_(self, h: Any, weights: W, y: Tensor) -> None:
        """y [rows, out] += scale · h Bᵀ, in place: the result of `shrink` times each row's B."""


@runtime_checkable
class SiblingsBackend(Protocol):
    """A LoRA backend that expands for several linears at once."""

    def expand_siblings_(self, h: Any, weights: Sequence[Any], ys: Sequence[Tensor]) -> None:
        """As `LoraBackend.expand_` for all linears that share the `shrink` h, two or three, in their
        order."""


class TrainingLoraBackend(LoraBackend[LoraWeights], Protocol):
    """A LoRA backend with backward."""

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """Gradients of A and B from grad [rows, out] of the output. That of x [rows, in] is added to `grad_x`
        unless that is None."""


def or_zeros(found: Sequence[Tensor | None], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of matrices, with zeros for adapters without rows."""
    pairs = zip(found, matrices, strict=True)
    return [torch.zeros_like(matrix) if own is None else own for own, matrix in pairs]
