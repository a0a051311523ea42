"""Which way rows of several adapters are multiplied: declared here, from measurements, and nowhere else.

Every way is described by its plain twins in `reference.py`, forward and backward.

- *Grouped*: one adapter after the other, each with its own two products (`grouped.py`; `lora.py` where an
  adapter has tensors of its own), which is what PEFT does.
- *Gathered*, segmented: each row by its own adapter's matrices, two operations for all adapters. Without a
  graph these lie in a stack (`gathered.py` on a CPU, `triton/stack.py` on a GPU); in one there is
  `triton/segmented.py`.
- *Block-sparse*: what lies between as blocks of rows and ranks (`blocksparse.py`, `triton/blocksparse.py`).

Serving takes stacks where `gathering` says so. `make_way` is for matrices that lie end to end, in a graph or
without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.kernels import gathered
from coserve.kernels.blocksparse import BlockSparse
from coserve.kernels.grouped import Grouped
from coserve.kernels.layout import Layout
from coserve.kernels.many import Way
from coserve.kernels.triton import is_installed


class Approach(StrEnum):
    """The ways there are for adapters that lie end to end."""

    GROUPED = "grouped"
    SEGMENTED = "segmented"
    BLOCK_SPARSE = "block-sparse"


@dataclass(frozen=True, slots=True)
class Gathering:
    """Bounds within which a gather beats one adapter after the other: segments of at most `rows` rows, and in
    a step at least `adapters` of one rank."""

    rows: int
    adapters: int


# A CPU's: two cores, 255M shape, seven linears a layer; docs/adapters.md has the figures.
_GATHERING: Final = {"cpu": Gathering(rows=24, adapters=2), "cuda": Gathering(rows=16, adapters=2)}
# Of what lies end to end: block-sparse where segments have at most so many rows on average, else grouped.
# 16 adapters at a 1024x1024 linear, forward and back, ms block-sparse / grouped for segments of 2, 64 and 512
# rows: rank 8 0.36 / 2.1, 0.69 / 4.3, 7.4 / 19; ranks 16 to 128 1.1 / 2.8, 3.0 / 4.6, 24 / 31.
_SHORT: Final = {"cpu": 512}
# That stacks have; beyond them, multiples of 64.
_RANKS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_COARSE: Final = 64


class Stack(Protocol):
    """Matrices of several adapters of one rank at linears that are given the same input, each adapter in a
    slot. `owned` says which slot each row belongs to, as `own_rows` makes it."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one adapter's share."""
        ...

    def put(self, slot: int, linear: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Copies a [rank, in] and b [out, rank] of one linear into a slot, b times `scale`."""
        ...

    def shrink(self, x: Tensor, owned: Any) -> Tensor:
        """x [rows, in] by each row's own A: [rows, rank of all linears]."""
        ...

    def expand(self, linear: int, h: Tensor, owned: Any) -> Tensor:
        """Multiplies the result of `shrink` by each row's own B of one linear: [rows, out]."""
        ...


def gathering(device: torch.device) -> Gathering | None:
    """Bounds for tensors of a device; None where adapters always go one after the other."""
    if device.type == "cuda" and not is_installed():
        return None
    return _GATHERING.get(device.type)


def choose(layout: Layout, device: torch.device) -> Approach:
    """The way that measured fastest for a layout on a device."""
    if device.type == "cuda" and is_installed():
        return Approach.SEGMENTED
    rows = sum(segment.stop - segment.start for segment in layout.rows)
    few = rows <= len(layout.rows) * _SHORT.get(device.type, 0)
    return Approach.BLOCK_SPARSE if few and len(layout.rows) > 1 else Approach.GROUPED


def make_way(layout: Layout, rows: int, device: torch.device, approach: Approach | None = None) -> Way:
    """Makes the way in which tensors of so many rows are multiplied, the fastest if none is asked for.
    Without Triton a device's segments are multiplied one after the other."""
    approach = choose(layout, device) if approach is None else approach
    if approach is Approach.GROUPED:
        return Grouped(layout)
    if device.type == "cuda" and is_installed():
        from coserve.kernels.triton.ways import BlockSparseWay, SegmentedWay

        of_layout = SegmentedWay if approach is Approach.SEGMENTED else BlockSparseWay
        return of_layout.of(layout, device)
    return BlockSparse.of(layout, rows, device) if approach is Approach.BLOCK_SPARSE else Grouped(layout)


def stack_rank(rank: int) -> int:
    """The rank of the stack that an adapter of `rank` lies in, at most 1.6 times as large: adapters of
    neighbouring ranks share one, and what is filled up is zeros that are read."""
    return next((size for size in _RANKS if size >= rank), -(-rank // _COARSE) * _COARSE)


def make_stack(slots: int, rank: int, inputs: int, outputs: Sequence[int], like: Tensor) -> Stack:
    """An empty stack for linears [outputs[i], inputs], in the type and on the device of `like`."""
    if like.is_cuda:
        from coserve.kernels.triton.stack import TritonStack

        return TritonStack(slots, rank, inputs, outputs, like)
    return gathered.Stack(slots, rank, inputs, outputs, like)


def own_rows(slots: Sequence[int], device: torch.device) -> Any:
    """Makes the layout of rows for the stacks of a device: rows, one after the other, and the slot of
    each."""
    if device.type == "cuda":
        from coserve.kernels.triton.stack import RowTiles

        return RowTiles(slots, device)
    return gathered.Owned(slots, device)
