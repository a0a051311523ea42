"""Which way rows of several adapters are multiplied: declared here, from measurements, and nowhere else.

Every way is described by its plain twins in `reference.py`. *Grouped*: one adapter after the other, each with
its own two products (`lora.py`), which is what PEFT does. *Gathered*: each row by its own adapter's matrices
in a stack, two operations for all adapters of a rank (`gathered.py` on a CPU, `triton/stack.py` on a GPU).
*Block-sparse*: what lies between as blocks of rows and ranks (`triton/blocksparse.py`); no measurement has
asked for it yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.kernels import gathered
from coserve.kernels.triton import is_installed


@dataclass(frozen=True, slots=True)
class Gathering:
    """When a gather beats one adapter after the other: segments of at most `rows` rows, and in a step at
    least `adapters` of one rank."""

    rows: int
    adapters: int


# A CPU's: two cores, 255M shape, seven linears a layer; docs/adapters.md has the figures.
_GATHERING: Final = {"cpu": Gathering(rows=24, adapters=2), "cuda": Gathering(rows=16, adapters=2)}
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
        """What `shrink` gave by each row's own B of one linear: [rows, out]."""
        ...


def gathering(device: torch.device) -> Gathering | None:
    """For tensors of a device; None where adapters always go one after the other."""
    if device.type == "cuda" and not is_installed():
        return None
    return _GATHERING.get(device.type)


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
    """For the stacks of a device: rows, one after the other, and the slot of each."""
    if device.type == "cuda":
        from coserve.kernels.triton.stack import RowTiles

        return RowTiles(slots, device)
    return gathered.Owned(slots, device)
