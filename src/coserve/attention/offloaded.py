"""Attention over keys and values that do not lie in the device's pages, chunk by chunk.

Symbiosis 3.4: the cache of a long sequence is in slower memory, and its rows pass the same linears in the
same step as everybody else's. `kernels/chunked.py` has the arithmetic.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from coserve.attention.backend import CacheShape, InferenceRows
from coserve.core.plan import OffloadReads
from coserve.errors import CoserveError, OffloadFailed
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.chunked import ChunkedAttention

CHUNK: Final = 4 << 20  # bytes that are read at once
WORKSPACE: Final = 3 * CHUNK  # bytes: what is read with the rest of its blocks, and scores
BLOCK: Final = 4096  # bytes; a page has whole blocks of them in each layer


class OffloadTier(Protocol):
    """Slower memory. Methods raise CoserveError or OSError, as disks fail."""

    def take(self, nbytes: int) -> Any:
        """Allocates a place, a multiple of `BLOCK` bytes."""
        ...

    def write(self, place: Any, start: int, data: Tensor) -> None:
        """Writes the bytes of a contiguous tensor from byte `start` of a place on."""
        ...

    def read(self, place: Any, start: int, nbytes: int) -> Tensor:
        """Bytes [nbytes] of a place, on the device; valid until the next call."""
        ...

    def free(self, place: Any) -> None:
        """Gives a place back."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadedSegment:
    """`count` rows of sequence `key` from position `start` on."""

    key: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _OffloadedPlace:
    """A sequence's place, and room for its tokens there."""

    place: Any
    pages: int


def offloaded_page_nbytes(caches: Sequence[CacheShape], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of a page in slower memory, all layers'."""
    return sum(_layer_nbytes(cache, page_size, dtype) for cache in caches)


class OffloadedCache:
    """Keys and values of whole sequences in a tier, in the base's type: layer by layer, token by token, so
    that what one layer needs of a sequence is read in order.

    A sequence whose bytes cannot be written or read is lost: its rows give zeros from then on, and
    `take_lost` says why. The others go on.
    """

    def __init__(
        self, caches: Sequence[CacheShape], page_size: int, dtype: torch.dtype, tier: OffloadTier
    ) -> None:
        self._caches, self._dtype, self._tier = caches, dtype, tier
        self._layers = [_layer_nbytes(cache, page_size, dtype) for cache in caches]  # of a page
        self._before = [sum(self._layers[:layer]) for layer in range(len(caches))]
        self._held: dict[int, _OffloadedPlace] = {}
        self._lost: set[int] = set()
        self._told: dict[int, CoserveError] = {}
        self._reads = OffloadReads()

    def begin(self, key: int, pages: int) -> None:
        """Allocates room for all tokens that a sequence will have."""
        try:
            self._held[key] = _OffloadedPlace(self._tier.take(pages * sum(self._layers)), pages)
        except (CoserveError, OSError) as error:
            self._lose(key, error)

    def end(self, key: int) -> None:
        """Frees a sequence's place, if it has one."""
        if (held := self._held.pop(key, None)) is not None:
            self._tier.free(held.place)
        self._lost.discard(key)

    def take_lost(self) -> dict[int, CoserveError]:
        """Sequences that were lost since the last call, and why."""
        lost, self._told = self._told, {}
        return lost

    def take_reads(self) -> OffloadReads:
        """Bytes and seconds that were read since the last call."""
        reads, self._reads = self._reads, OffloadReads()
        return reads

    def attend(
        self, layer: int, segment: OffloadedSegment, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """As `AttentionBackend.attend`, for the rows of one sequence. Memory beside the output is bounded,
        however many tokens there are."""
        if segment.key not in self._lost:
            try:
                return self._attend(layer, segment, q[0], k[0], v[0], spec)
            except (CoserveError, OSError) as error:
                self._lose(segment.key, error)
        return v.new_zeros(1, segment.count, q.shape[1], v.shape[-1])

    def _attend(
        self, layer: int, segment: OffloadedSegment, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        source = layer
        while (below := self._caches[source].reads) is not None:
            source = below
        start, held, cache = segment.start, self._held[segment.key], self._caches[source]
        found = ChunkedAttention(q, start, cache.groups, cache.value, spec)
        end = start + segment.count
        if source == layer:
            self._write(layer, held, start, k, v)
            found.add(k, v, start)
            end = start
        row = cache.width * self._dtype.itemsize
        first = 0 if spec.window is None else max(start - spec.window + 1, 0)
        most = max(CHUNK // row, 1)
        for low in range(first, end, most):
            count = min(most, end - low)
            keys, values = self._read(source, held, low, count)
            found.add(keys, values, low)
        return found.result().transpose(0, 1)[None]

    def _write(self, layer: int, held: _OffloadedPlace, start: int, k: Tensor, v: Tensor) -> None:
        rows = torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], dim=1)
        place = held.pages * self._before[layer] + start * rows.shape[1] * rows.element_size()
        self._tier.write(held.place, place, rows)

    def _read(self, layer: int, held: _OffloadedPlace, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys [groups, count, dk] and values [groups, count, dv] from position `start` on."""
        cache = self._caches[layer]
        row, begun = cache.width * self._dtype.itemsize, time.perf_counter()
        place = held.pages * self._before[layer] + start * row
        data = self._tier.read(held.place, place, count * row)
        seconds = self._reads.seconds + time.perf_counter() - begun
        self._reads = OffloadReads(self._reads.nbytes + count * row, seconds)
        rows, width = data.view(self._dtype).view(count, -1), cache.groups * cache.key
        keys, values = rows[:, :width], rows[:, width:]
        return (
            keys.view(count, cache.groups, cache.key).transpose(0, 1),
            values.view(count, cache.groups, cache.value).transpose(0, 1),
        )

    def _lose(self, key: int, error: Exception) -> None:
        self._lost.add(key)
        self._told[key] = OffloadFailed(
            f"the keys and values of this long prompt are lost, as slower memory failed: {error}"
        )


class SplitRows:
    """A pass's inference rows, `count` with padding: those with pages on the device, then those of offloaded
    sequences. A `BatchPart`; its keys and values are of layers `shift` further on than in the pass."""

    keeper = None

    def __init__(
        self,
        resident: InferenceRows | None,
        cache: OffloadedCache,
        segments: Sequence[OffloadedSegment],
        count: int,
    ) -> None:
        self.count, self.shift = count, 0
        self._resident, self._cache, self._segments = resident, cache, segments

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        outputs, start, layer = [], 0, layer + self.shift
        if self._resident is not None:
            start = self._resident.count
            outputs.append(
                self._resident.attend(layer, q[:, :, :start], k[:, :, :start], v[:, :, :start], spec)
            )
        for segment in self._segments:
            rows = slice(start, start + segment.count)
            outputs.append(
                self._cache.attend(layer, segment, q[:, :, rows], k[:, :, rows], v[:, :, rows], spec)
            )
            start += segment.count
        if padding := self.count - start:
            outputs.append(v.new_zeros(1, padding, q.shape[1], v.shape[-1]))
        return torch.cat(outputs, dim=1)


def _layer_nbytes(cache: CacheShape, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of a page in one layer."""
    return -(-page_size * cache.width * dtype.itemsize // BLOCK) * BLOCK
