"""Tensors of many shapes end to end in a few flat ones, so that one operation covers all of them.

A *slab* holds neighbours. It is small enough for the C library to keep its bytes when they are freed
(`memory/malloc.py`): the system would map a larger one anew at each step, page by page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

_MOST: Final = 1 << 22  # elements of a slab: 16 MiB in float32. A larger tensor has its own slab.


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a tensor: elements [start, stop) of slab `slab`."""

    slab: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slabs:
    """Layout of tensors in slabs, by name, in order; `sizes` are the slabs' numbers of elements."""

    slots: Mapping[str, Slot]
    sizes: tuple[int, ...]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], most: int = _MOST) -> "Slabs":
        slots: dict[str, Slot] = {}
        sizes: list[int] = []
        for name, shape in shapes.items():
            count = prod(shape)
            if not sizes or sizes[-1] + count > most:
                sizes.append(0)
            slots[name] = Slot(len(sizes) - 1, sizes[-1], sizes[-1] + count, shape)
            sizes[-1] += count
        return Slabs(slots, tuple(sizes))

    def empty(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Uninitialised slabs."""
        return [torch.empty(size, dtype=dtype, device=device) for size in self.sizes]

    def views(self, slabs: list[Tensor]) -> dict[str, Tensor]:
        """The tensors in these slabs, by name."""
        return {name: slabs[s.slab][s.start : s.stop].view(s.shape) for name, s in self.slots.items()}
