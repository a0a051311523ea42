"""Slots: adapters of one rank in the slots of shared tables, each filled once and then only read.

Segmented gather on a CPU: all rows by their adapters' matrices, in place, in two operations. Both products of
a low-rank bypass are weighted sums of table rows, as `embedding_bag` computes them at memory bandwidth in
bfloat16: x Aᵀ is the sum of Aᵀ's rows weighted by x, and its product with B the sum of B's rows weighted by
that. So rows are not padded, adapters stay separate, and adapters without rows are not read. On two cores, 64
rows of 32 adapters of rank 8 at a 1024x1024 linear took 78 and 28 µs; batched products, whose two factors
torch packs anew in every call, 94 and 63 at best; one adapter after the other 620 and 960. Memory bandwidth
allows 18 each. The plain twin is `reference.multi_lora`. `triton/slots.py` is the backend for GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """All slots' matrices at one linear: `down` is the table of A of all linears with the same input, `up`
    [slots, rank, out] the linear's B, transposed and scaled, `ranks` its columns of the result of
    `shrink`."""

    down: Tensor
    up: Tensor
    ranks: slice


class SlotTables:
    """Tables for up to `slots` adapters of one rank at linears with the same input. A of all linears is
    concatenated: [slots, in, all ranks] where `inputs_first`, else [slots, all ranks, in]."""

    def __init__(
        self, slots: int, rank: int, inputs: int, outputs: Sequence[int], like: Tensor, inputs_first: bool
    ) -> None:
        ranks = rank * len(outputs)
        self._rank, self._inputs_first = rank, inputs_first
        self._down = like.new_empty(slots, *((inputs, ranks) if inputs_first else (ranks, inputs)))
        self._ranks_first = self._down.transpose(1, 2) if inputs_first else self._down
        self._up = [like.new_empty(slots, rank, width) for width in outputs]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return sum(table[0].nbytes for table in (self._down, *self._up))

    def grow(self, slots: int) -> None:
        """Makes the tables larger, for `slots` slots; `weights` from before have the old tables."""
        taken = len(self._down)
        for table in (self._down, *self._up):
            if table.device.type == "cuda":  # else the stream that made it may reuse its memory at once
                table.record_stream(torch.cuda.current_stream(table.device))
        self._down, *self._up = (
            torch.cat([table, table.new_empty(slots - taken, *table.shape[1:])])
            for table in (self._down, *self._up)
        )
        self._ranks_first = self._down.transpose(1, 2) if self._inputs_first else self._down

    def put(self, slot: int, linear: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Copies a [rank, in] and b [out, rank] of one linear into a slot; smaller ranks are padded with
        zeros. b is multiplied by the scale and rounded once."""
        rank = len(a)
        down, up = self._ranks_first[slot, self._ranks(linear)], self._up[linear][slot]
        down[:rank] = a
        torch.mul(b.t(), scale, out=up[:rank])
        if rank < self._rank:
            down[rank:], up[rank:] = 0, 0

    def weights(self, linear: int) -> SlotWeights:
        """The tables of one linear."""
        return SlotWeights(self._down, self._up[linear], self._ranks(linear))

    def _ranks(self, linear: int) -> slice:
        return slice(linear * self._rank, (linear + 1) * self._rank)


class PlainSlots:
    """A LoRA backend for tables of either kind, from the slot of each row or -1, [rows]: the plain twin of
    `triton.slots`. Rows without a slot keep what they have. `shrink` gives [rows, all ranks]."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots

    def shrink(self, x: Tensor, weights: SlotWeights) -> Tensor:
        """See `LoraBackend`."""
        down = weights.down if weights.down.shape[1] == x.shape[1] else weights.down.transpose(1, 2)
        own = self._slots >= 0
        h = x.new_zeros(len(x), down.shape[2])
        index = own.nonzero()[:, 0]
        h[index] = torch.bmm(x[index][:, None], down[self._slots[index].long()])[:, 0]
        return h

    def expand_siblings_(self, h: Tensor, weights: Sequence[SlotWeights], ys: Sequence[Tensor]) -> None:
        """As `expand_` for all linears of the same `down`."""
        for own, y in zip(weights, ys, strict=True):
            self.expand_(h, own, y)

    def expand_(self, h: Tensor, weights: SlotWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        index = (self._slots >= 0).nonzero()[:, 0]
        own = h[index][:, None, weights.ranks]
        y[index] += torch.bmm(own, weights.up[self._slots[index].long()])[:, 0]


class GatheredSlots:
    """A LoRA backend for tables with inputs first, from ranges of rows without overlaps and their slots.
    `shrink` gives [those rows, all ranks]."""

    def __init__(self, segments: Sequence[tuple[slice, int]], device: torch.device) -> None:
        slots = [slot for rows, slot in segments for _ in range(rows.stop - rows.start)]
        self._slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self._lines: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: slice | Tensor = slice(segments[0][0].start, segments[-1][0].stop)
        if self._rows.stop - self._rows.start != len(slots):
            self._rows = torch.cat([torch.arange(r.start, r.stop, device=device) for r, _ in segments])

    def shrink(self, x: Tensor, weights: SlotWeights) -> Tensor:
        """See `LoraBackend`."""
        return self._bag(weights.down, x[self._rows])

    def expand_(self, h: Tensor, weights: SlotWeights, y: Tensor) -> None:
        """See `LoraBackend`."""
        added = self._bag(weights.up, h[:, weights.ranks])
        if isinstance(self._rows, slice):
            y[self._rows].add_(added)
        else:
            y.index_add_(0, self._rows, added)

    def _bag(self, table: Tensor, factors: Tensor) -> Tensor:
        """[rows, width]: the sum of the lines of each row's slot in table [slots, lines, width], weighted by
        `factors` [rows, lines]."""
        lines, starts = self._places(table.shape[1])
        table = table.flatten(0, 1)
        return F.embedding_bag(lines, table, starts, mode="sum", per_sample_weights=factors.reshape(-1))

    def _places(self, height: int) -> tuple[Tensor, Tensor]:
        """For tables with `height` lines a slot: the lines of each row's slot, [rows * height], and each
        row's offset among these, [rows]."""
        if height not in self._lines:
            own = torch.arange(height, dtype=torch.int32, device=self._slots.device)
            starts = torch.arange(
                0, len(self._slots) * height, height, dtype=torch.int32, device=self._slots.device
            )
            self._lines[height] = (self._slots[:, None] * height + own).flatten(), starts
        return self._lines[height]
