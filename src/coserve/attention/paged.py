"""Attention whose decode rows, and rows in tiles, read pages in place, by a kernel for GPUs; chunks as in
`batched.py`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.attention.backend import CacheShape, CommonAttentionMetadata
from coserve.attention.batched import BatchedBackend, BatchedMetadata, DecodeRows, UnrotatedRows
from coserve.attention.store import KVStore
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.row_tiles import RowTiles
from coserve.kernels.triton import is_installed


class PagedBackend(BatchedBackend):
    """The `AttentionBackend` of a GPU with Triton, for pages in the base's type."""

    is_capturable = True

    def clean(self, pages: Sequence[int]) -> None:
        """See `AttentionBackend`: does nothing, as positions that no row has written are never read."""

    def _in_tiles(self, common: CommonAttentionMetadata, tiles: RowTiles) -> DecodeRows:
        return DecodeRows(common.block_table, common.positions + 1, self.page_size, tiles)

    def attend_rotated(
        self, layer: int, rows: UnrotatedRows, metadata: BatchedMetadata, spec: AttentionSpec
    ) -> Tensor:
        """See `BatchedBackend`; decode rows, and rows in tiles, are rotated and written by one kernel."""
        decode = metadata.decode
        if decode is None or metadata.prefills or not self._owns[layer]:
            return super().attend_rotated(layer, rows, metadata, spec)
        from coserve.kernels.triton.rotary_pages import rotate_into_pages

        slots, keys, values = metadata.slot_mapping, self._keys[layer].whole, self._values[layer].whole
        queries = rotate_into_pages(rows.q, rows.k, rows.v, *rows.tables, slots, keys, values)
        found = self._attend_decode(layer, queries.transpose(0, 1)[None], metadata, decode, spec)
        padding = rows.q.shape[2] - len(slots)
        return found if not padding else F.pad(found, (0, 0, 0, 0, 0, padding))

    def _attend_decode(
        self, layer: int, q: Tensor, metadata: BatchedMetadata, rows: DecodeRows, spec: AttentionSpec
    ) -> Tensor:
        from coserve.kernels.triton.pages import attend_pages

        keys, values = self._keys[layer].whole, self._values[layer].whole
        queries = q[0].transpose(0, 1)
        pages, lengths, size = rows.pages, rows.lengths, self.page_size
        return attend_pages(queries, keys, values, pages, lengths, size, spec, rows.tiles)[None]


def make_batched(
    caches: Sequence[CacheShape],
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    store: type[KVStore] = KVStore,
) -> BatchedBackend:
    """Makes the fastest backend of a device for this storage type and base's type; the kernel has no
    float64."""
    in_place = device.type == "cuda" and is_installed() and not store.rounds and dtype != torch.float64
    kind = PagedBackend if in_place else BatchedBackend
    return kind(caches, pages, page_size, dtype, device, store)
