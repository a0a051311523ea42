"""LoRA backends: how the rows of a step are multiplied with the low-rank matrices of their own adapters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from coserve.kernels.rows import concat_rows

W = TypeVar("W", contravariant=True)
Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]  # of all A [rank, in], and of all B [out, rank]


@dataclass(frozen=True)
class LoraWeights:
    """Matrices of several adapters at one linear: adapter i has a[i] [rank, in] and b[i] [out, rank], times
    scales[i]."""

    a: Sequence[Tensor]
    b: Sequence[Tensor]
    scales: Sequence[float]

    @cached_property
    def down(self) -> Tensor:
        """All A end to end, [all ranks, in]."""
        return concat_rows(self.a)

    @cached_property
    def up(self) -> Tensor:
        """All B, transposed and times their scales, end to end: [all ranks, out]."""
        return concat_rows([b.t() * scale for b, scale in zip(self.b, self.scales, strict=True)])


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


class TableBackend(ABC):
    """A backend that multiplies by tables in which the matrices of all adapters lie end to end."""

    def shrink(self, x: Tensor, weights: LoraWeights) -> Tensor:
        """See `LoraBackend`."""
        return self._shrink(x, weights.down)

    def expand_(self, h: Tensor, weights: LoraWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        self._expand_(h, weights.up, y)

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        between = self._shrink(grad, weights.up)
        if grad_x is not None:
            self._expand_(between, weights.down, grad_x)
        ranks = [len(a) for a in weights.a]
        of_down = torch.split(self._outer(between, x), ranks)
        of_up = torch.split(self._outer(self._shrink(x, weights.down), grad), ranks)
        of_b = [(found.t() * scale).to(x.dtype) for found, scale in zip(of_up, weights.scales, strict=True)]
        return [found.to(x.dtype) for found in of_down], of_b

    @abstractmethod
    def _shrink(self, x: Tensor, table: Tensor) -> Tensor:
        """x [rows, in] by each row's own ranks of a table [ranks, in]."""

    @abstractmethod
    def _expand_(self, h: Tensor, table: Tensor, y: Tensor) -> None:
        """y [rows, out] += what `_shrink` gave by each row's own ranks of a table [ranks, out]."""

    @abstractmethod
    def _outer(self, h: Tensor, x: Tensor) -> Tensor:
        """[ranks, in]: what `_shrink` gave, transposed, by x [rows, in], each adapter over its own rows."""
