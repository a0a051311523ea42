"""Attention backends for tests: every one that there is, and one of another layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from coserve.attention.backend import AttentionBackend, CacheShape, CommonAttentionMetadata, PageCopy
from coserve.attention.batched import BatchedBackend
from coserve.attention.store import Int8KVStore, KVStore
from coserve.attention.tiled import TiledBackend
from coserve.kernels.attention import AttentionSpec
from coserve_benchmarks.gpu.plain_backend import PlainBackend


class Make(Protocol):
    """Makes a backend, as an engine does."""

    def __call__(
        self,
        caches: Sequence[CacheShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        store: type[KVStore] = KVStore,
    ) -> AttentionBackend[Any]: ...


@dataclass(frozen=True)
class PageMajorMetadata:
    """Each row's sequence, page, place in the page and place among its sequence's rows, [rows] each;
    `block_table` int32 [sequences, pages] and `seq_lens`, `query_lens` [sequences], as kernels for pages on a
    GPU want them."""

    sequence: Tensor
    page: Tensor
    offset: Tensor
    query: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_lens: Tensor


class PageMajorBackend:
    """A backend whose pages are [page, groups, page_size, width], keys and values of a page side by side. All
    sequences attend in one padded product; decode rows are not told from others."""

    is_capturable = False

    def __init__(
        self,
        caches: Sequence[CacheShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        store: type[KVStore] = KVStore,
    ) -> None:
        assert store is KVStore, "numbers lie as they are"
        self.page_size, self.padding_page = page_size, pages
        self._keys, self._pages = [c.key for c in caches], list[Tensor]()
        self._owns = [c.reads is None for c in caches]
        for c in caches:
            shape = pages + 1, c.groups, page_size, c.key + c.value
            new = torch.zeros(shape, dtype=dtype, device=device)
            self._pages.append(new if c.reads is None else self._pages[c.reads])

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._own)

    @property
    def _own(self) -> list[Tensor]:
        return [x for x, is_own in zip(self._pages, self._owns, strict=True) if is_own]

    def clean(self, pages: Sequence[int]) -> None:
        for x in self._own:
            x[list(pages)] = 0

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for source, target, tokens in copies:
            for x in self._own:
                x[target, :, :tokens] = x[source, :, :tokens]

    def fill(self, layer: int, pages: Sequence[int], k: Tensor, v: Tensor) -> None:
        if self._owns[layer]:
            at = torch.arange(k.shape[1])
            page = torch.tensor(list(pages), dtype=torch.long)[at // self.page_size]
            self._pages[layer][page, :, at % self.page_size] = torch.cat([k, v], -1).transpose(0, 1)

    @property
    def page_nbytes(self) -> int:
        return self.nbytes // (self.padding_page + 1)

    def read_pages(self, pages: Sequence[int], into: Tensor) -> None:
        into.copy_(torch.cat([x[list(pages)].flatten(1).view(torch.uint8) for x in self._own], 1))

    def write_pages(self, pages: Sequence[int], data: Tensor) -> None:
        parts = data.split([x[0].nbytes for x in self._own], 1)
        for x, part in zip(self._own, parts, strict=True):
            x.flatten(1).view(torch.uint8)[list(pages)] = part

    def build(self, common: CommonAttentionMetadata) -> PageMajorMetadata:
        query_lens, seq_lens = torch.tensor(common.query_lens), torch.tensor(common.seq_lens)
        sequence = torch.arange(len(query_lens)).repeat_interleave(query_lens)
        page = common.block_table[sequence, common.positions // self.page_size]
        query = common.positions - (seq_lens - query_lens)[sequence]
        offset, table = common.positions % self.page_size, common.block_table.to(torch.int32)
        return PageMajorMetadata(sequence, page, offset, query, table, seq_lens, query_lens)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: PageMajorMetadata, spec: AttentionSpec
    ) -> Tensor:
        m, rows, pages = metadata, len(metadata.page), self._pages[layer]
        if self._owns[layer]:
            pages[m.page, :, m.offset] = torch.cat([k[0, :, :rows], v[0, :, :rows]], -1).transpose(0, 1)
        share = q.shape[1] // pages.shape[1]
        cached = pages[m.block_table.long()].transpose(1, 2).flatten(2, 3).repeat_interleave(share, 1)
        keys, values = cached.split([self._keys[layer], v.shape[-1]], -1)
        queries = q.new_zeros(len(m.seq_lens), q.shape[1], int(m.query_lens.max()), q.shape[-1])
        queries[m.sequence, :, m.query] = q[0, :, :rows].transpose(0, 1)
        scores = (queries @ keys.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        position = (m.seq_lens - m.query_lens)[:, None] + torch.arange(queries.shape[2])
        age = position[:, None, :, None] - torch.arange(keys.shape[2])
        scores = scores.masked_fill((age < 0) | (age >= (spec.window or keys.shape[2])), float("-inf"))
        if spec.sinks is not None:
            sinks = spec.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        out = q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])
        out[0, :rows] = (weights.to(v.dtype) @ values)[m.sequence, :, m.query]
        return out


def make_plain(
    caches: Sequence[CacheShape],
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    store: type[KVStore] = KVStore,
) -> PlainBackend:
    """The plain twin, which has one type."""
    return PlainBackend(caches, pages, page_size, device)


def draw(groups: int, count: int, width: int, draws: torch.Generator) -> Tensor:
    """Keys or values [groups, count, width] in float64 that eight bits keep exactly, and bfloat16 too:
    multiples of 1/64 between ends that are there."""
    numbers = torch.randint(-127, 128, (groups, count, width), generator=draws)
    numbers[..., 0], numbers[..., 1] = -127, 127
    return numbers.double() / 64


# Those that stand for every backend there is: later ones are added here.
BACKENDS: dict[str, Make] = {
    "plain": make_plain,
    "batched": BatchedBackend,
    "batched in eight bits": partial(BatchedBackend, store=Int8KVStore),
    "tiled": TiledBackend,
    "tiled in eight bits": partial(TiledBackend, store=Int8KVStore),
    "page major": PageMajorBackend,
}
