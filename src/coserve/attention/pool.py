"""The page layout of backends with batched products: keys and values group by group.

Pools are [groups, slots, width], with one slot per token, so that a gathered page is contiguous and decode
reads each group's keys in place.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coserve.attention.backend import CacheShape, CommonAttentionMetadata, PageCopy
from coserve.attention.store import KVStore


class KVPool:
    """Keys and values of all layers in `pages` pages of `page_size` slots, and one page of zeros: an
    `AttentionBackend` without `attend`.

    The page of zeros pads block tables: masked values must be finite, because 0 x NaN is NaN. `store` is the
    storage type.
    """

    is_capturable: ClassVar[bool] = False

    def __init__(
        self,
        caches: Sequence[CacheShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        store: type[KVStore] = KVStore,
    ) -> None:
        self.page_size = page_size
        self.padding_page = pages
        self.rounds = store.rounds
        self._device = device
        self._last: tuple[Tensor, int, Tensor] | None = None
        slots = (pages + 1) * page_size
        self._keys: list[KVStore] = []
        self._values: list[KVStore] = []
        for c in caches:  # a layer reads one below it
            self._keys.append(
                store(c.groups, slots, c.key, dtype, device) if c.reads is None else self._keys[c.reads]
            )
            self._values.append(
                store(c.groups, slots, c.value, dtype, device) if c.reads is None else self._values[c.reads]
            )
        self._owns = [c.width > 0 for c in caches]

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        return sum(store.nbytes for store in self._stores)

    @property
    def _stores(self) -> Iterator[KVStore]:
        """All distinct stores."""
        for keys, values, is_own in zip(self._keys, self._values, self._owns, strict=True):
            if is_own:
                yield keys
                yield values

    def clean(self, pages: Sequence[int]) -> None:
        """See `AttentionBackend`. Zeros them: a NaN left behind would reach the next owner, because neither a
        bias of -inf nor a weight of 0 masks it."""
        index = self._tensor(pages)
        for store in self._stores:
            store.clean(index, self.page_size)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """See `AttentionBackend`."""
        size = self.page_size
        slots = [(c.source * size + i, c.target * size + i) for c in copies for i in range(c.tokens)]
        if slots:
            sources, targets = self._tensor(slots).unbind(1)
            for store in self._stores:
                store.copy(sources, targets)

    def fill(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
        """See `AttentionBackend`."""
        first = self._tensor(pages)[:, None] * self.page_size
        slots = (first + torch.arange(self.page_size, device=self._device)).flatten()
        self.write(layer, slots[: k.shape[1]], k, v)

    @property
    def page_nbytes(self) -> int:
        """See `AttentionBackend`."""
        return self.nbytes // (self.padding_page + 1)

    def read_pages(self, pages: Sequence[int], into: Tensor) -> None:
        """See `AttentionBackend`."""
        index = self._tensor(pages)
        for part, place in self._page_bytes(into):
            place.copy_(part.index_select(1, index).transpose(0, 1))

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        """See `AttentionBackend`."""
        index = self._tensor(pages)
        for part, place in self._page_bytes(data):
            part.index_copy_(1, index, place.transpose(0, 1))

    def _page_bytes(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes [groups, pages, n] of each tensor, and their place [rows, groups, n] in pages' bytes."""
        start = 0
        for store in self._stores:
            for part in store.page_bytes(self.page_size):
                nbytes = part.shape[0] * part.shape[2]
                yield part, data[:, start : start + nbytes].view(len(data), part.shape[0], -1)
                start += nbytes

    def slot_mapping(self, common: CommonAttentionMetadata) -> Tensor:
        """Slots [rows] of the rows' tokens."""
        positions = common.positions
        if common.tiles is not None:
            sequences = common.tiles.lines
        elif len(sequences := torch.arange(len(common.query_lens), device=self._device)) < len(positions):
            lens = self._tensor(common.query_lens)
            sequences = sequences.repeat_interleave(lens, output_size=len(positions))
        pages = common.block_table[sequences, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k [groups, rows, dk] and v [groups, rows, dv] into slots [rows]; nothing in a layer that
        reads another's."""
        if not self._owns[layer]:
            return
        self._keys[layer].write(slots, k)
        self._values[layer].write(slots, v)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [groups, len(pages) * page_size, width] of the pages, in order."""
        rows = self._rows(pages, self._keys[layer].groups)
        return self._keys[layer].gather(rows, self.page_size), self._values[layer].gather(
            rows, self.page_size
        )

    def _rows(self, pages: Tensor, groups: int) -> Tensor:
        """Row indices of the pages in [groups * pages, ...], in order, cached for all layers of a step.
        Another thread may gather pages of its own meanwhile."""
        last = self._last
        if last is None or last[0] is not pages or last[1] != groups:
            first = torch.arange(groups, device=pages.device)[:, None] * (self.padding_page + 1)
            self._last = last = (pages, groups, (first + pages.flatten()).flatten())
        return last[2]

    def _tensor(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
