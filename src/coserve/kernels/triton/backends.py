"""The kernels as LoRA backends, in a graph and without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.lora.backend import TableBackend
from coserve.kernels.lora.layout import Layout
from coserve.kernels.triton import blocksparse, segmented
from coserve.kernels.triton.blocksparse import Topology
from coserve.kernels.triton.tiles import Tiles


@dataclass(frozen=True, slots=True)
class TritonSegmented(TableBackend):
    """By `segmented.py`."""

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
    """By `blocksparse.py`."""

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
