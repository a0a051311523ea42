"""The kernels as ways to multiply a layout: what `kernels/many.py` takes, in a graph and without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.layout import Layout
from coserve.kernels.triton import blocksparse, segmented
from coserve.kernels.triton.blocksparse import Topology
from coserve.kernels.triton.tiles import Tiles


@dataclass(frozen=True, slots=True)
class SegmentedWay:
    """By `segmented.py`."""

    tiles: Tiles

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "SegmentedWay":
        return SegmentedWay(Tiles.of(layout, device))

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        return segmented.shrink(x, a, self.tiles)

    def expand_(self, h: Tensor, b: Tensor, y: Tensor) -> None:
        segmented.expand_(h, b, y, self.tiles)

    def outer(self, h: Tensor, x: Tensor) -> Tensor:
        return segmented.outer(h, x, self.tiles)


@dataclass(frozen=True, slots=True)
class BlockSparseWay:
    """By `blocksparse.py`."""

    topology: Topology

    @staticmethod
    def of(layout: Layout, device: torch.device) -> "BlockSparseWay":
        return BlockSparseWay(Topology.of(layout, device))

    def shrink(self, x: Tensor, a: Tensor) -> Tensor:
        return blocksparse.dds(x, a, self.topology)

    def expand_(self, h: Tensor, b: Tensor, y: Tensor) -> None:
        blocksparse.sdd_(h, b, y, self.topology)

    def outer(self, h: Tensor, x: Tensor) -> Tensor:
        return blocksparse.transposed(h, x, self.topology)
