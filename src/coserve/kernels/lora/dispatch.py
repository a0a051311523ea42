"""Chooses the LoRA backend for rows of several adapters, from measurements.

Every backend equals `reference.multi_lora` and `multi_lora_backward`.

- *Grouped*: one adapter after the other, each with its own two products, as PEFT.
- *Slots*: each row by its own adapter's matrices in tables that are filled once, two operations for all
  adapters (`slots.py` on a CPU, `triton/slots.py` on a GPU). Without a graph.
- *Block-sparse*: the intermediate as blocks of rows and ranks (`blocksparse.py`, `triton/blocksparse.py`).
- *Segmented*: tiles of rows, each by its own adapter's ranks (`triton/segmented.py`).

Serving uses slots within `slot_bounds`; `make_backend` is for matrices without slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from coserve.kernels.lora.backend import LoraBackend, TrainingLoraBackend
from coserve.kernels.lora.blocksparse import BlockSparse
from coserve.kernels.lora.grouped import Grouped
from coserve.kernels.lora.layout import Layout
from coserve.kernels.lora.slots import GatheredSlots, PlainSlots, SlotTables, SlotWeights
from coserve.kernels.row_tiles import RowTiles
from coserve.kernels.triton import is_installed


class Approach(StrEnum):
    """Approaches for adapters without slots."""

    GROUPED = "grouped"
    SEGMENTED = "segmented"
    BLOCK_SPARSE = "block-sparse"


@dataclass(frozen=True, slots=True)
class SlotBounds:
    """Bounds within which slots are fastest: segments of at most `rows` rows, and at least `adapters` of one
    rank in a step."""

    rows: int
    adapters: int


# A CPU's: two cores, 255M shape, seven linears a layer; docs/adapters.md has the figures.
_SLOT_BOUNDS: Final = {"cpu": SlotBounds(rows=24, adapters=2), "cuda": SlotBounds(rows=16, adapters=2)}
# In no slot: block-sparse where segments have at most so many rows on average, and so many of them have each
# rank, else grouped. A 1024x1024 linear, forward and back, ms block-sparse / grouped for segments of 1, 32
# and 128 rows: 8 of rank 8 0.70 / 2.3, 1.1 / 2.8, 2.7 / 4.9; 2 of each of four ranks 2.2 / 2.2, 3.8 / 3.1,
# 7.6 / 5.9; 4 of each 2.7 / 4.5, 5.2 / 7.4, 14 / 13; one of each 1.4 / 1.1, 1.6 / 1.5, 3.0 / 2.4.
_SHORT: Final = {"cpu": 512}
_ALIKE: Final = 2
# On a GPU one segment alone, or segments of so many rows on average, are grouped: few large products by
# torch, and no matrices copied into tables. Not measured.
_LONG: Final = 128
# That slots have; beyond them, multiples of 64.
_RANKS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_COARSE: Final = 64


def slot_bounds(device: torch.device) -> SlotBounds | None:
    """Bounds for a device; None where slots are not used."""
    if device.type == "cuda" and not is_installed():
        return None
    return _SLOT_BOUNDS.get(device.type)


def choose(layout: Layout, device: torch.device) -> Approach:
    """The fastest approach for a layout on a device: measured on a CPU, reasoned on a GPU."""
    segments = len(layout.rows)
    rows = sum(segment.stop - segment.start for segment in layout.rows)
    if device.type == "cuda" and is_installed():
        return Approach.GROUPED if segments == 1 or rows >= segments * _LONG else Approach.SEGMENTED
    sizes = len({ranks.stop - ranks.start for _, ranks in layout})
    is_short = rows <= segments * _SHORT.get(device.type, 0)
    return Approach.BLOCK_SPARSE if is_short and segments >= _ALIKE * sizes else Approach.GROUPED


def make_backend(
    layout: Layout, device: torch.device, approach: Approach | None = None
) -> TrainingLoraBackend:
    """Makes the backend for a device, by default the fastest. A GPU without Triton uses grouped products."""
    approach = choose(layout, device) if approach is None else approach
    if approach is Approach.GROUPED:
        return Grouped(layout.segments)
    if device.type == "cuda" and is_installed():
        from coserve.kernels.triton.backends import TritonBlockSparse, TritonSegmented

        of_layout = TritonSegmented if approach is Approach.SEGMENTED else TritonBlockSparse
        return of_layout.of(layout, device)
    return BlockSparse.of(layout, device) if approach is Approach.BLOCK_SPARSE else Grouped(layout.segments)


def slot_rank(rank: int) -> int:
    """The slot's rank for an adapter of `rank`, at most 1.6 times as large: neighbouring ranks share tables,
    padded with zeros."""
    return next((size for size in _RANKS if size >= rank), -(-rank // _COARSE) * _COARSE)


def make_slot_tables(slots: int, rank: int, inputs: int, outputs: Sequence[int], like: Tensor) -> SlotTables:
    """Empty tables for linears [outputs[i], inputs], in the type and on the device of `like`."""
    return SlotTables(slots, rank, inputs, outputs, like, inputs_first=not like.is_cuda)


def make_slot_backend(
    segments: Sequence[tuple[slice, int]], device: torch.device
) -> LoraBackend[SlotWeights]:
    """Makes the slot backend of a device for ranges of rows, in order, each with its slot."""
    if device.type == "cuda":
        count = max((rows.stop for rows, _ in segments), default=0)
        slots = [-1] * count
        for rows, slot in segments:
            slots[rows] = [slot] * (rows.stop - rows.start)
        return make_row_slots(torch.tensor(slots, dtype=torch.int32).to(device))
    return GatheredSlots(segments, device)


def make_row_slots(slots: Tensor, tiles: RowTiles | None = None) -> LoraBackend[SlotWeights]:
    """Makes the slot backend of the device of `slots` [rows] int32, the slot of each row or -1. It is read by
    each product, as `tiles` are, so that its numbers may change between them."""
    if slots.is_cuda:
        from coserve.kernels.triton.slots import TritonSlots

        return TritonSlots(slots, tiles)
    return PlainSlots(slots)
