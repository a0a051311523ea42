"""Attention over keys and values that do not lie in the device's pages, chunk by chunk.

Symbiosis 3.4: the cache of a long sequence is in slower memory, and its rows pass the same linears in the
same step as everybody else's. `kernels/chunked.py` has the arithmetic.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.attention.backend import CacheShape, InferenceRows
from coserve.attention.states import Core
from coserve.core.plan import OffloadReads
from coserve.errors import CoserveError, OffloadFailed
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.chunked import ChunkedAttention
from coserve.streamed.files import PAGE
from coserve.worker.page_store import WORD, PageStore

CHUNK: Final = 4 << 20  # bytes that are read at once; on a GPU in halves, one ahead of the other
_CPU: Final = torch.device("cpu")
WORKSPACE: Final = 3 * CHUNK  # bytes: what is read with the rest of its blocks, and scores


@dataclass(frozen=True, slots=True)
class OffloadedSegment:
    """`count` rows of sequence `key` from position `start` on."""

    key: int
    start: int
    count: int


def offloaded_page_nbytes(caches: Sequence[CacheShape], page_size: int, dtype: torch.dtype) -> int:
    """Most bytes of a page in slower memory, all layers'."""
    return sum(-(-page_size * _row_nbytes(cache, dtype) // PAGE) * PAGE for cache in caches)


class OffloadedCache:
    """Keys and values of whole sequences in a `store`, in the base's type: layer by layer, a row for each
    token, so that what one layer needs of a sequence is read in order. There is room for `pages`.

    A sequence whose bytes cannot be written or read is lost: its rows give zeros from then on, and
    `take_lost` says why. The others go on. On a GPU a stream of its own moves them, while the rows attend to
    what has come before; the host waits for nothing.
    """

    def __init__(
        self,
        caches: Sequence[CacheShape],
        page_size: int,
        dtype: torch.dtype,
        store: PageStore[Any],
        device: torch.device = _CPU,
    ) -> None:
        is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._timed: list[tuple[Any, Any]] = []  # events around reads whose seconds are not counted yet
        self.store, self.pages = store, store.nbytes // offloaded_page_nbytes(caches, page_size, dtype)
        self._caches, self._page_size, self._dtype = caches, page_size, dtype
        self._lost: set[int] = set()
        self._told: dict[int, CoserveError] = {}
        self._reads = OffloadReads()

    def begin(self, key: int, pages: int) -> None:
        """Takes room for all tokens that a sequence will have."""
        try:
            for layer, cache in enumerate(self._caches):
                if cache.reads is None:
                    self.store.make((key, layer), pages * self._page_size, _row_nbytes(cache, self._dtype))
        except (CoserveError, OSError) as error:
            self._lose(key, error)

    def end(self, key: int) -> None:
        """Frees what a sequence has, if it has anything."""
        for layer in range(len(self._caches)):
            self.store.drop((key, layer))
        self._lost.discard(key)

    def take_lost(self) -> dict[int, CoserveError]:
        """Sequences that were lost since the last call, and why."""
        lost, self._told = self._told, {}
        return lost

    def take_reads(self) -> OffloadReads:
        """Bytes and seconds that were read since the last call, once their step has ended."""
        reads, self._reads = self._reads, OffloadReads()
        timed, self._timed = self._timed, []
        on_stream = sum(began.elapsed_time(ended) for began, ended in timed) / 1e3
        return OffloadReads(reads.nbytes, reads.seconds + on_stream)

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
        start, name, cache = segment.start, (segment.key, source), self._caches[source]
        found = ChunkedAttention(q, start, cache.groups, cache.value, spec)
        end = start + segment.count
        if source == layer:
            rows = torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], dim=1)
            nbytes = rows.view(torch.uint8)
            self._write(name, start, F.pad(nbytes, (0, -nbytes.shape[1] % WORD)))
            found.add(k, v, start)
            end = start
        first = 0 if spec.window is None else max(start - spec.window + 1, 0)
        at_once = CHUNK if self._stream is None else CHUNK // 2
        most = max(at_once // _row_nbytes(cache, self._dtype), 1)
        reads = deque[tuple[int, Tensor, Any]]()
        for low in range(first, end, most):
            reads.append((low, *self._read(name, low, min(most, end - low))))
            if self._stream is None or len(reads) > 1:
                self._add(found, cache, *reads.popleft())
        for read in reads:
            self._add(found, cache, *read)
        return found.result().transpose(0, 1)[None]

    def _write(self, name: tuple[int, int], start: int, rows: Tensor) -> None:
        if self._stream is None:
            return self.store.put(name, start, rows)
        self._stream.wait_event(torch.cuda.current_stream(rows.device).record_event())
        with torch.cuda.stream(self._stream):
            self.store.put(name, start, rows)
        rows.record_stream(self._stream)

    def _read(self, name: tuple[int, int], start: int, count: int) -> tuple[Tensor, Any]:
        """Rows from position `start` on, and the event behind which they are there; None on a processor."""
        if self._stream is None:
            begun = time.perf_counter()
            data = self.store.get(name, start, count)
            self._count(data.nbytes, time.perf_counter() - begun)
            return data, None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            began.record()
            data = self.store.get(name, start, count)
            ended.record()
        self._timed.append((began, ended))
        self._count(data.nbytes, 0.0)
        return data, ended

    def _add(self, found: ChunkedAttention, cache: CacheShape, start: int, data: Tensor, there: Any) -> None:
        """Has rows attend to keys [groups, count, dk] and values [groups, count, dv] from position `start`
        on."""
        if there is not None:
            stream = torch.cuda.current_stream(data.device)
            stream.wait_event(there)
            data.record_stream(stream)
        keys, values, _ = data.view(self._dtype).tensor_split([cache.groups * cache.key, cache.width], 1)
        found.add(
            keys.view(len(data), cache.groups, cache.key).transpose(0, 1),
            values.view(len(data), cache.groups, cache.value).transpose(0, 1),
            start,
        )

    def _count(self, nbytes: int, seconds: float) -> None:
        self._reads = OffloadReads(self._reads.nbytes + nbytes, self._reads.seconds + seconds)

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

    def mix(self, core: Core, start: int) -> Tensor:
        raise AssertionError("no sequence of a base with recurrent layers is offloaded")


def _row_nbytes(cache: CacheShape, dtype: torch.dtype) -> int:
    """Bytes of a token in one layer, whole words."""
    return -(-cache.width * dtype.itemsize // WORD) * WORD
