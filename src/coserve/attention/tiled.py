"""Attention of the deterministic mode: batch-invariant, bit for bit.

Rows attend in tiles (`kernels.aligned`): the row at position p is always the same row of a product of the
same shape, whatever else is in the pass.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.attention.backend import CommonAttentionMetadata
from coserve.attention.pool import KVPool
from coserve.kernels.aligned import QUERIES, attend_tile, reach, tile_bias
from coserve.kernels.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries of one sequence at positions from `start` on; `pages` hold the tile's keys, padded."""

    start: int
    pages: Tensor


@dataclass(frozen=True, slots=True)
class TiledMetadata:
    """A pass's tiles, and for each row its slot, its tile and its row there, [rows] each. `biases` are the
    tiles' masks by start and sliding window, made on first use."""

    slot_mapping: Tensor
    tiles: list[_Tile]
    tile_of: Tensor
    place_of: Tensor
    biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class TiledBackend(KVPool):
    """The `AttentionBackend` of the deterministic mode. Decode rows are treated as any others."""

    def build(self, common: CommonAttentionMetadata) -> TiledMetadata:
        """See `AttentionBackend`."""
        made: list[_Tile] = []
        tiles: list[int] = []
        places: list[int] = []
        for count, end, pages in zip(common.query_lens, common.seq_lens, common.block_table, strict=True):
            first = len(made) - (end - count) // QUERIES
            positions = range(end - count, end)
            for start in range(positions[0] // QUERIES * QUERIES, end, QUERIES):
                made.append(_Tile(start, self._reached(pages, end, reach(start))))
            tiles += [first + position // QUERIES for position in positions]
            places += [position % QUERIES for position in positions]
        return TiledMetadata(self.slot_mapping(common), made, self._tensor(tiles), self._tensor(places))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: TiledMetadata, spec: AttentionSpec
    ) -> Tensor:
        """See `AttentionBackend`."""
        slots, tile_of, place_of = metadata.slot_mapping, metadata.tile_of, metadata.place_of
        rows, heads = len(slots), q.shape[1]
        self.write(layer, slots, k[0, :, :rows], v[0, :, :rows])
        queries = q.new_zeros(len(metadata.tiles), heads, QUERIES, q.shape[-1])
        queries[tile_of, :, place_of] = q[0, :, :rows].transpose(0, 1)
        outputs = torch.stack(
            [
                self._attend_tile(layer, tile, queries[i], metadata, spec)
                for i, tile in enumerate(metadata.tiles)
            ]
        )
        out = q.new_zeros(1, q.shape[2], heads, v.shape[-1])
        out[0, :rows] = outputs[tile_of, :, place_of]
        return out

    def _attend_tile(
        self, layer: int, tile: _Tile, q: Tensor, metadata: TiledMetadata, spec: AttentionSpec
    ) -> Tensor:
        keys, values = self.gather(layer, tile.pages)
        key = tile.start, spec.window
        if key not in metadata.biases:
            metadata.biases[key] = tile_bias(*key, q.device)
        bias = metadata.biases[key]
        return attend_tile(q, keys[:, : bias.shape[1]], values[:, : bias.shape[1]], bias, spec)

    def _reached(self, pages: Tensor, end: int, keys: int) -> Tensor:
        """A sequence's first pages [n] with `keys` keys; pages from position `end` on are padding."""
        written, wanted = -(-end // self.page_size), -(-keys // self.page_size)
        own = pages[: min(written, wanted)]
        return F.pad(own, (0, wanted - len(own)), value=self.padding_page)
