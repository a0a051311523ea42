"""Attention with one batched product for all decode rows, and one call for each prefill chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from coserve.attention.backend import CommonAttentionMetadata
from coserve.attention.pool import KVPool
from coserve.kernels import elementwise
from coserve.kernels.attention import AttentionSpec, attend, attend_decode
from coserve.kernels.native import ops as native
from coserve.kernels.native.layer import DecodePages, LayerPages
from coserve.kernels.row_tiles import RowTiles

# Products of a query's numbers with positions, for each chunk: 0.2 ms on two cores, as a chunk's calls take.
_SHORT: Final = 1 << 22
_CELLS: Final = 1 << 17  # of a table with a line for each row: 1 MiB


@dataclass(frozen=True)
class DecodeRows:
    """Sequences with one row each. `pages` [batch, n] of `page_size`, padded; `lengths` [batch] including
    that row. Of rows in `tiles`, `pages` are a block table."""

    pages: Tensor
    lengths: Tensor
    page_size: int
    tiles: RowTiles | None = None

    @cached_property
    def native(self) -> DecodePages:
        """The rows as kernels of whole layers read them."""
        return DecodePages(self.pages, self.lengths, self.page_size)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """`count` tokens of one sequence from position `start`; `pages` [n] hold [0, start + count)."""

    start: int
    count: int
    pages: Tensor


@dataclass(frozen=True)
class BatchedMetadata:
    """A pass's rows: decode rows, then chunks. `find_slots` finds their slots, `find_alone` all rows as if
    each were a decode row, in a block table of so many `cells`; `biases` are the decode rows' masks by
    sliding window, made on first use."""

    find_slots: Callable[[], Tensor]
    find_alone: Callable[[], DecodeRows]
    decode: DecodeRows | None
    prefills: Sequence[PrefillRows]
    cells: int
    biases: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """Slots [rows] of the rows' keys and values."""
        return self.find_slots()

    @cached_property
    def alone(self) -> DecodeRows:
        """All rows as decode rows: a row of a chunk attends to the positions up to its own."""
        return self.find_alone()

    @cached_property
    def pairs(self) -> int:
        """Positions that all rows of chunks attend to."""
        return sum(chunk.count * (2 * chunk.start + chunk.count + 1) // 2 for chunk in self.prefills)

    def are_short(self, width: int) -> bool:
        """Tells whether chunks are so short that their queries, of `width` numbers, take less time as decode
        rows than the calls for each chunk do, and no long sequence beside them makes the table large."""
        return self.pairs * width <= _SHORT * len(self.prefills) and self.cells <= _CELLS


class UnrotatedRows(NamedTuple):
    """Queries [1, heads, rows, dk], keys and values of one call's rows, and the `tables` by which queries and
    keys are yet to be rotated, cos and sin [1, rows, dk]."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: tuple[Tensor, Tensor]


class BatchedBackend(KVPool):
    """The `AttentionBackend` of a CPU; it runs on every device."""

    def build(self, common: CommonAttentionMetadata) -> BatchedMetadata:
        """See `AttentionBackend`."""
        decodes, decode = common.num_decodes, None
        if common.tiles is not None:
            decode = self._in_tiles(common, common.tiles)
        elif decodes:
            pages = common.block_table[:decodes, : self._pages_for(max(common.seq_lens[:decodes]))]
            decode = DecodeRows(pages.contiguous(), common.positions[:decodes] + 1, self.page_size)
        prefills = []
        for sequence in range(decodes, len(common.seq_lens)):
            count, end = common.query_lens[sequence], common.seq_lens[sequence]
            pages = common.block_table[sequence, : self._pages_for(end)]
            prefills.append(PrefillRows(end - count, count, pages))
        slots, alone = partial(self.slot_mapping, common), partial(self._alone, common)
        cells = sum(common.query_lens) * self._pages_for(max(common.seq_lens, default=0))
        return BatchedMetadata(slots, alone, decode, prefills, cells)

    def _in_tiles(self, common: CommonAttentionMetadata, tiles: RowTiles) -> DecodeRows:
        """Rows in tiles, each as a decode row of its own."""
        return DecodeRows(common.block_table[tiles.lines], common.positions + 1, self.page_size)

    def _alone(self, common: CommonAttentionMetadata) -> DecodeRows:
        counts = torch.tensor(common.query_lens, device=common.block_table.device)
        tables = common.block_table[:, : self._pages_for(max(common.seq_lens))]
        pages = tables.repeat_interleave(counts, dim=0, output_size=sum(common.query_lens))
        return DecodeRows(pages, common.positions + 1, self.page_size)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: BatchedMetadata, spec: AttentionSpec
    ) -> Tensor:
        """See `AttentionBackend`."""
        slots = metadata.slot_mapping
        count = len(slots)
        self.write(layer, slots, k[0, :, :count], v[0, :, :count])
        outputs = []
        decode, prefills, start = metadata.decode, metadata.prefills, 0
        if prefills and self._reads(q, spec) and metadata.are_short(q.shape[1] * q.shape[3]):
            decode, prefills = metadata.alone, []
        if decode is not None:
            start = len(decode.lengths)
            outputs.append(self._attend_decode(layer, q[:, :, :start], metadata, decode, spec))
        for chunk in prefills:
            rows = slice(start, start + chunk.count)
            outputs.append(
                self._attend_chunk(chunk, layer, q[:, :, rows], k[:, :, rows], v[:, :, rows], spec)
            )
            start += chunk.count
        if padding := q.shape[2] - count:
            outputs.append(v.new_zeros(1, padding, q.shape[1], v.shape[-1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_rotated(
        self, layer: int, rows: UnrotatedRows, metadata: BatchedMetadata, spec: AttentionSpec
    ) -> Tensor:
        """As `attend`, once queries and keys are rotated."""
        q, k = (elementwise.rotate(x, *rows.tables) for x in (rows.q, rows.k))
        return self.attend(layer, q, k, rows.v, metadata, spec)

    def decode_pages(self, layers: Sequence[int], metadata: BatchedMetadata, width: int) -> LayerPages | None:
        """The pages of a pass's rows in these layers, whose queries have `width` numbers; None where there
        are longer chunks than `are_short` takes, or a layer has no pages that kernels read."""
        rows = metadata.decode
        if metadata.prefills:
            rows = metadata.alone if metadata.are_short(width) else None
        if rows is None or self.rounds or not all(self._owns[layer] for layer in layers):
            return None
        keys, values = ([of[layer].whole for layer in layers] for of in (self._keys, self._values))
        return LayerPages(rows.native, keys, values)

    def _reads(self, q: Tensor, spec: AttentionSpec) -> bool:
        """Tells whether a kernel attends for decode rows in the pages themselves."""
        return spec.is_plain and not self.rounds and native.takes(q)

    def _attend_decode(
        self, layer: int, q: Tensor, metadata: BatchedMetadata, rows: DecodeRows, spec: AttentionSpec
    ) -> Tensor:
        batch = len(rows.lengths)
        if self._reads(q, spec):
            keys, values = self._keys[layer].whole, self._values[layer].whole
            queries = q[0].transpose(0, 1)
            return native.attend_pages(
                queries, keys, values, rows.pages, rows.lengths, self.page_size, spec.scale, spec.window
            )[None]
        keys, values = self.gather(layer, rows.pages)
        keys = keys.view(keys.shape[0], batch, -1, keys.shape[-1])
        values = values.view(values.shape[0], batch, -1, values.shape[-1])
        if spec.window not in metadata.biases:
            metadata.biases[spec.window] = _bias(rows.lengths, keys.shape[2], spec.window)
        bias = metadata.biases[spec.window]
        return attend_decode(q[0].transpose(0, 1), keys, values, bias, spec)[None]

    def _attend_chunk(
        self, chunk: PrefillRows, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        # However a prompt is cut, its rows see the same.
        if chunk.start > 0 or self.rounds or spec.reads is not None:
            end = chunk.start + chunk.count
            keys, values = self.gather(layer, chunk.pages)
            k, v = keys[None, :, :end], values[None, :, :end]
        return attend(q, k, v, spec).transpose(1, 2)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def _bias(lengths: Tensor, slots: int, window: int | None) -> Tensor:
    """Additive mask [batch, 1, slots]: 0 where a decode row attends, -inf elsewhere."""
    positions, ends = torch.arange(slots, device=lengths.device), lengths[:, None]
    hidden = positions >= ends
    if window is not None:
        hidden |= positions < ends - window
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None]
