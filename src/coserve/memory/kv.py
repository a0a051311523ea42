"""Paged keys and values on the device, and the inference rows that live in them.

Which page belongs to whom is `memory.pages`' business; here a page is an index. Pools lie group by group
([groups, slots, width], a slot being one token's place) so that a gathered page is one run of memory and
decode reads each group's keys where its product wants them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.kernels.attention import AttentionSpec, attend, attend_decode
from coserve.memory.store import Store


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Keys and values of one layer: `groups` heads, `key` and `value` widths, the sliding `window` in
    positions (None is unlimited). A layer that `reads` another's has none of its own."""

    groups: int
    key: int
    value: int
    window: int | None = None
    reads: int | None = None

    @property
    def width(self) -> int:
        """Numbers that a token's own take: none where they are another layer's."""
        return 0 if self.reads is not None else self.groups * (self.key + self.value)


class KVPool:
    """Keys and values of all layers in `pages` pages of `page_size` slots, and one more page of zeros.

    The page of zeros pads page tables: what is masked must still be finite, because 0 x NaN is NaN. `store`
    is how they lie in memory.
    """

    def __init__(
        self,
        caches: Sequence[CacheShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        store: type[Store] = Store,
    ) -> None:
        self.page_size = page_size
        self.padding_page = pages
        self.rounds = store.rounds
        self._last: tuple[Tensor, int, Tensor] | None = None
        slots = (pages + 1) * page_size
        self._keys: list[Store] = []
        self._values: list[Store] = []
        for c in caches:  # a layer reads one below it
            self._keys.append(
                store(c.groups, slots, c.key, dtype, device) if c.reads is None else self._keys[c.reads]
            )
            self._values.append(
                store(c.groups, slots, c.value, dtype, device) if c.reads is None else self._values[c.reads]
            )
        self._owns = [c.reads is None for c in caches]

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    @property
    def _stores(self) -> Iterator[Store]:
        """All there are, each once."""
        for keys, values, is_own in zip(self._keys, self._values, self._owns, strict=True):
            if is_own:
                yield keys
                yield values

    def clean(self, pages: Tensor) -> None:
        """Zeros pages [n] that change hands: a NaN left in keys or values would reach their next owner,
        because neither a bias of -inf nor a weight of 0 masks it."""
        for store in self._stores:
            store.clean(pages, self.page_size)

    def slots(self, pages: Tensor) -> Tensor:
        """All slots [n * page_size] of pages [n], in their order."""
        first = pages[:, None] * self.page_size
        return (first + torch.arange(self.page_size, device=pages.device)).flatten()

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots `sources` [n] into slots `targets` [n], in every layer."""
        for store in self._stores:
            store.copy(sources, targets)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k [groups, rows, dk] and v [groups, rows, dv] into slots [rows]; a layer that reads another's has
        nothing to write."""
        if not self._owns[layer]:
            return
        self._keys[layer].write(slots, k)
        self._values[layer].write(slots, v)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [groups, len(pages) * page_size, width] of the pages, in their order."""
        rows = self._rows(pages, self._keys[layer].groups)
        return self._keys[layer].gather(rows, self.page_size), self._values[layer].gather(
            rows, self.page_size
        )

    def _rows(self, pages: Tensor, groups: int) -> Tensor:
        """Which rows of [groups * pages, ...] the pages are; the same for all layers of a step."""
        if self._last is None or self._last[0] is not pages or self._last[1] != groups:
            first = torch.arange(groups, device=pages.device)[:, None] * (self.padding_page + 1)
            self._last = (pages, groups, (first + pages).flatten())
        return self._last[2]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences that pass one token each. `pages` [batch * n], padded; `lengths` [batch] with that token."""

    pages: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """`count` tokens of one sequence from position `start`; `pages` [n] hold [0, start + count)."""

    start: int
    count: int
    pages: Tensor


class InferenceRows:
    """A step's inference rows: decode rows first, then prefill chunks. A `Part` of a fused run.

    `padding` rows follow that belong to nobody (see `core.row_buckets`): they see nothing and are not cached.
    """

    keeper = None

    def __init__(
        self,
        pool: KVPool,
        slots: Tensor,
        decode: DecodeRows | None,
        prefills: Sequence[PrefillRows],
        padding: int = 0,
    ) -> None:
        self.count = len(slots) + padding
        self._padding = padding
        self._pool = pool
        self._slots = slots
        self._decode = decode
        self._prefills = prefills
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        count = len(self._slots)
        self._pool.write(layer, self._slots, k[0, :, :count], v[0, :, :count])
        outputs = []
        start = 0
        if self._decode is not None:
            start = len(self._decode.lengths)
            outputs.append(self._attend_decode(self._decode, layer, q[:, :, :start], spec))
        for chunk in self._prefills:
            rows = slice(start, start + chunk.count)
            outputs.append(
                self._attend_chunk(chunk, layer, q[:, :, rows], k[:, :, rows], v[:, :, rows], spec)
            )
            start += chunk.count
        if self._padding:
            outputs.append(v.new_zeros(1, self._padding, q.shape[1], v.shape[-1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_decode(self, rows: DecodeRows, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        batch = len(rows.lengths)
        keys, values = self._pool.gather(layer, rows.pages)
        keys = keys.view(keys.shape[0], batch, -1, keys.shape[-1])
        values = values.view(values.shape[0], batch, -1, values.shape[-1])
        return attend_decode(q[0].transpose(0, 1), keys, values, self._bias(rows, spec.window), spec)[None]

    def _attend_chunk(
        self, chunk: PrefillRows, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        # However a prompt is cut, its rows see the same.
        if chunk.start > 0 or self._pool.rounds or spec.reads is not None:
            end = chunk.start + chunk.count
            keys, values = self._pool.gather(layer, chunk.pages)
            k, v = keys[None, :, :end], values[None, :, :end]
        return attend(q, k, v, spec).transpose(1, 2)

    def _bias(self, rows: DecodeRows, window: int | None) -> Tensor:
        """[batch, 1, slots]: 0 where a decode row may look, -inf elsewhere; the same for all layers alike."""
        if window not in self._biases:
            lengths = rows.lengths[:, None]
            slots = len(rows.pages) // len(lengths) * self._pool.page_size
            positions = torch.arange(slots, device=lengths.device)
            hidden = positions >= lengths
            if window is not None:
                hidden |= positions < lengths - window
            self._biases[window] = torch.zeros(
                hidden.shape, dtype=torch.float32, device=hidden.device
            ).masked_fill_(hidden, float("-inf"))[:, None]
        return self._biases[window]
