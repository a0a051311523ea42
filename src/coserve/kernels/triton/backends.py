"""LoRA backends of the Triton kernels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora.backend import Gradients, LoraWeights
from coserve.kernels.lora.layout import Layout
from coserve.kernels.triton import blocksparse, segmented
from coserve.kernels.triton.blocksparse import Topology
from coserve.kernels.triton.tiles import Tiles


class TableBackend(ABC):
    """A backend that concatenates the matrices of all adapters into tables."""

    def shrink(self, x: Tensor, weights: LoraWeights) -> Tensor:
        """See `LoraBackend`."""
        return self._shrink(x, _down(weights))

    def expand_(self, h: Tensor, weights: LoraWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        self._expand_(h, _up(weights), y)

    def backward(self, grad: Tensor, x: Tensor, weights: LoraWeights, grad_x: Tensor | None) -> Gradients:
        """See `TrainingLoraBackend`."""
        down, up = _down(weights), _up(weights)
        between = self._shrink(grad, up)
        if grad_x is not None:
            self._expand_(between, down, grad_x)
        ranks = [len(a) for a in weights.a]
        of_down = torch.split(self._outer(between, x), ranks)
        of_up = torch.split(self._outer(self._shrink(x, down), grad), ranks)
        of_b = [(found.t() * scale).to(x.dtype) for found, scale in zip(of_up, weights.scales, strict=True)]
        return [found.to(x.dtype) for found in of_down], of_b

    @abstractmethod
    def _shrink(self, x: Tensor, table: Tensor) -> Tensor:
        """x [rows, in] times each row's ranks of a table [ranks, in]."""

    @abstractmethod
    def _expand_(self, h: Tensor, table: Tensor, y: Tensor) -> None:
        """y [rows, out] += the result of `_shrink` times each row's ranks of a table [ranks, out]."""

    @abstractmethod
    def _outer(self, h: Tensor, x: Tensor) -> Tensor:
        """[ranks, in] in float32: the result of `_shrink`, transposed, times x [rows, in], for each adapter
        over its rows."""


def _down(weights: LoraWeights) -> Tensor:
    """All A concatenated, [all ranks, in]."""
    return torch.cat(list(weights.a))


def _up(weights: LoraWeights) -> Tensor:
    """All B, transposed, scaled and concatenated: [all ranks, out]."""
    return torch.cat([b.t() * scale for b, scale in zip(weights.b, weights.scales, strict=True)])


@dataclass(frozen=True, slots=True)
class TritonSegmented(TableBackend):
    """The backend of `segmented.py`."""

    tiles: Tiles

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "TritonSegmented":
        return TritonSegmented(Tiles.of(layout, device))

    def _shrink(self, x: Tensor, table: Tensor) -> Tensor:
        return segmented.shrink(x, table, self.tiles)

    def _expand_(self, h: Tensor, table: Tensor, y: Tensor) -> None:
        segmented.expand_(h, table, y, self.tiles)

    def _outer(self, h: Tensor, x: Tensor) -> Tensor:
        return segmented.outer(h, x, self.tiles)


@dataclass(frozen=True, slots=True)
class TritonBlockSparse(TableBackend):
    """The backend of `blocksparse.py`."""

    topology: Topology

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "TritonBlockSparse":
        return TritonBlockSparse(Topology.of(layout, device))

    def _shrink(self, x: Tensor, table: Tensor) -> Tensor:
        return blocksparse.dds(x, table, self.topology)

    def _expand_(self, h: Tensor, table: Tensor, y: Tensor) -> None:
        blocksparse.sdd_(h, table, y, self.topology)

    def _outer(self, h: Tensor, x: Tensor) -> Tensor:
        return blocksparse.transposed(h, x, self.topology)
