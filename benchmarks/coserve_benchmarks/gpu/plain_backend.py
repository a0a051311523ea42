"""The reference attention backend: token by token, one sequence after the other, in float64."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coserve.attention.backend import CacheShape, CommonAttentionMetadata, PageCopy
from coserve.kernels import reference
from coserve.kernels.attention import AttentionSpec, causal_mask


class PlainBackend:
    """An `AttentionBackend` with pages [pages, page_size, groups, width]."""

    is_capturable: ClassVar[bool] = False

    def __init__(
        self, caches: Sequence[CacheShape], pages: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.padding_page = pages
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._owns = [c.reads is None for c in caches]
        for c in caches:
            for made, width in ((self._keys, c.key), (self._values, c.value)):
                if c.reads is None:
                    shape = pages, page_size, c.groups, width
                    made.append(torch.zeros(shape, dtype=torch.float64, device=device))
                else:
                    made.append(made[c.reads])

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        return sum(x.nbytes for x in self._own)

    @property
    def _own(self) -> list[Tensor]:
        """All distinct tensors."""
        layers = zip(self._keys, self._values, self._owns, strict=True)
        return [x for k, v, is_own in layers if is_own for x in (k, v)]

    def clean(self, pages: Sequence[int]) -> None:
        """See `AttentionBackend`: does nothing, because masked tokens are never read."""

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """See `AttentionBackend`."""
        for source, target, tokens in copies:
            for x in self._own:
                x[target, :tokens] = x[source, :tokens]

    def fill(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
        """See `AttentionBackend`."""
        for position in range(k.shape[1]):
            self._write(layer, pages, position, k[:, position], v[:, position])

    @property
    def page_nbytes(self) -> int:
        """See `AttentionBackend`."""
        return self.nbytes // self.padding_page

    def read_pages(self, pages: Sequence[int], into: Tensor) -> None:
        """See `AttentionBackend`."""
        for row, page in zip(into, pages, strict=True):
            row.copy_(torch.cat([x[page].flatten().view(torch.uint8) for x in self._own]))

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        """See `AttentionBackend`."""
        for row, page in zip(data, pages, strict=True):
            parts = row.split([x[page].nbytes for x in self._own])
            for x, part in zip(self._own, parts, strict=True):
                x[page].view(-1).view(torch.uint8).copy_(part)

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """See `AttentionBackend`."""
        return common

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: CommonAttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """See `AttentionBackend`."""
        out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])
        sinks = None if spec.sinks is None else spec.sinks.double()
        tables: list[list[int]] = metadata.block_table.tolist()
        start = 0
        for pages, count, end in zip(tables, metadata.query_lens, metadata.seq_lens, strict=True):
            rows = range(start, start + count)
            for row in rows:
                self._write(layer, pages, end - count + row - start, k[0, :, row], v[0, :, row])
            keys, values = self._read(layer, pages, end)
            allowed = causal_mask(count, end, spec.window, q.device)
            queries = q[:, :, rows].double()
            found = reference.attention(queries, keys, values, spec.scale, allowed, spec.softcap, sinks)
            out[:, rows] = found.transpose(1, 2).to(out.dtype)
            start += count
        return out

    def _write(self, layer: int, pages: Sequence[int], position: int, k: Tensor, v: Tensor) -> None:
        """Writes k [groups, dk] and v [groups, dv] of the token at a position; nothing in a layer that reads
        another's."""
        if self._owns[layer]:
            page, offset = pages[position // self.page_size], position % self.page_size
            self._keys[layer][page, offset] = k.double()
            self._values[layer][page, offset] = v.double()

    def _read(self, layer: int, pages: Sequence[int], end: int) -> tuple[Tensor, Tensor]:
        """Keys [1, groups, end, dk] and values [1, groups, end, dv] of positions 0 to `end`."""
        places = [(pages[position // self.page_size], position % self.page_size) for position in range(end)]
        keys = torch.stack([self._keys[layer][place] for place in places], dim=1)
        values = torch.stack([self._values[layer][place] for place in places], dim=1)
        return keys[None], values[None]
