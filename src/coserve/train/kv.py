"""Keys and values of a micro-batch, of its rows and virtual ones, and the gradients for both."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.adapters.virtual import Virtual
from coserve.memory.arena import Lease
from coserve.train.row_buffers import RowBuffers
from coserve.train.window import KV, PastKV, Window


class MicroBatchKV:
    """Keys and values of earlier windows for later ones, in every layer.

    `reads` has for each layer the layer whose keys and values it attends to, None for its own.
    """

    def __init__(self, reads: Sequence[int | None], rows: int, virtual: Virtual, lease: Lease) -> None:
        self.virtual = VirtualKV(virtual, lease)
        self._reads = reads
        self._own: tuple[RowBuffers[int], RowBuffers[int]] = (
            RowBuffers(rows, lease, dim=1),
            RowBuffers(rows, lease, dim=1),
        )
        self._grads = KVGradAccumulator(lease)

    def save(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """Stores k [groups, window rows, dk] and v. Windows of backward may differ from these."""
        for buffers, x in zip(self._own, (k, v), strict=True):
            buffers.write(layer, window.span, x)

    def own(self, layer: int, window: Window) -> KV:
        """The window's own keys and values, [1, groups, rows, width]."""
        return self._at(layer, window.span)

    def past(self, layer: int, window: Window) -> PastKV:
        """Keys and values that the window's rows may attend to beside those of the layer's own pass."""
        source = self._source(layer)
        if source not in self._own[0] and not self.virtual:  # of recurrent layers, or feed-forward alone
            return PastKV()
        return PastKV(
            self.virtual.of(source) if self.virtual else None,
            self._at(source, slice(window.before)) if window.before else None,
            self._at(source, window.past_span) if window.past else None,
            self._at(source, window.span) if source != layer else None,
        )

    def add_past_grads(self, layer: int, window: Window, grads: Sequence[Tensor]) -> None:
        """Adds this window's gradients of `PastKV.tensors` to those of earlier rows' keys and values (FlexLLM
        6.1, figure 10) and of virtual ones; where the layer reads another layer's, to that layer's. Sums are
        in at least float32."""
        pairs = iter(zip(grads[::2], grads[1::2], strict=True))
        source = self._source(layer)
        if not grads:  # nothing attends in the layer
            return
        if self.virtual:
            self.virtual.add_grads(source, next(pairs))
        if window.before:
            self._grads.add(source, slice(0, window.before), next(pairs))
        if window.past:
            self._grads.add(source, window.past_span, next(pairs))
        if source != layer:
            self._grads.add(source, window.span, next(pairs))

    def grads(self, layer: int, window: Window, dtype: torch.dtype) -> KV | None:
        """Gradients from later windows for this window's own keys and values, [1, groups, rows, width]; None
        if none."""
        return self._grads.total(layer, window.span, dtype)

    def has_grads(self, layer: int, window: Window) -> bool:
        """Tells whether there are any."""
        return self._grads.covers(layer, window.span)

    def drop_grads(self, layer: int, window: Window) -> None:
        """Frees those gradients once the window has gone back through the layer."""
        self._grads.drop(layer, window.span)

    def _source(self, layer: int) -> int:
        """The layer whose keys and values `layer` attends to."""
        reads = self._reads[layer]
        return layer if reads is None else reads

    def _at(self, layer: int, rows: slice) -> KV:
        keys, values = self._own
        return keys.read(layer, rows)[None], values.read(layer, rows)[None]


class VirtualKV:
    """Virtual keys and values before every example; false if there are none."""

    def __init__(self, virtual: Virtual, lease: Lease) -> None:
        self._virtual, self._lease = virtual, lease
        with torch.no_grad():
            self._given = [(k[None], v[None]) for k, v in virtual.caches()]
        self._grads: dict[int, KV] = {}

    def __bool__(self) -> bool:
        return self._virtual.given_count > 0

    def of(self, layer: int) -> KV:
        """Keys and values of a layer, [1, groups, n, width], outside of any graph."""
        return self._given[layer]

    def add_grads(self, layer: int, grads: KV) -> None:
        """Adds gradients [1, groups, n, width] to those of a layer's keys and values."""
        if layer not in self._grads:
            k, v = grads
            self._grads[layer] = _exact_zeros(k, self._lease), _exact_zeros(v, self._lease)
        for total, grad in zip(self._grads[layer], grads, strict=True):
            total += grad[0]

    def in_graph(self) -> list[Tensor]:
        """The keys and values in the current graph, of the layers of `grads` and in their order."""
        caches = self._virtual.caches()
        return [tensor for layer in sorted(self._grads) for tensor in caches[layer]]

    def grads(self) -> list[Tensor]:
        """Gradients from all windows so far, [groups, n, width]: of each layer of this process the keys',
        then the values'."""
        return [grad for layer in sorted(self._grads) for grad in self._grads[layer]]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Gradients for rows [first, first + n): keys [groups, n, dk] and values [groups, n, dv]."""

    first: int
    keys: Tensor
    values: Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[1]


class KVGradAccumulator:
    """Gradients from later windows for earlier rows' keys and values, by layer, summed until the backward of
    those rows (FlexLLM 6.1, figure 10): in at least float32, over the rows of one example.

    Windows come from the right, so a sum starts with its most rows; several sums may cover the same rows
    where other layers read a layer's keys and values.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._sums: dict[int, list[_Sums]] = {}

    def add(self, layer: int, rows: slice, grads: KV) -> None:
        """Adds gradients [1, groups, n, width] for the keys, and the values, of n rows."""
        first, end = rows.start or 0, rows.stop
        held = self._covering(layer, first, end)
        if held is None:
            held = _Sums(first, *(_exact_zeros(given, self._lease) for given in grads))
            self._sums.setdefault(layer, []).append(held)
        span = slice(first - held.first, end - held.first)
        held.keys[:, span] += grads[0][0]
        held.values[:, span] += grads[1][0]

    def total(self, layer: int, rows: slice, dtype: torch.dtype) -> KV | None:
        """The gradients of a window's keys and values, [1, groups, rows, width]; None if there are none."""
        due = self._due(layer, rows)
        return self._over(due, rows, dtype) if due else None

    def covers(self, layer: int, rows: slice) -> bool:
        """Tells whether there are any for these rows."""
        return bool(self._due(layer, rows))

    def drop(self, layer: int, rows: slice) -> None:
        """Frees a window's sums without rows left of it."""
        for held in self._due(layer, rows):
            if held.first >= rows.start:
                self._sums[layer].remove(held)
                self._lease.give_back((held.keys, held.values))

    def _due(self, layer: int, rows: slice) -> list[_Sums]:
        """Sums over any of a window's rows."""
        return [a for a in self._sums.get(layer, ()) if a.first < rows.stop and rows.start < a.end]

    def _covering(self, layer: int, first: int, end: int) -> _Sums | None:
        sums = self._sums.get(layer, ())
        return next((a for a in sums if a.first <= first and end <= a.end), None)

    def _over(self, due: list[_Sums], rows: slice, dtype: torch.dtype) -> KV:
        """The total of all sums over exactly these rows, zero where there are none."""
        count = rows.stop - rows.start
        sums = []
        for stores in ([a.keys for a in due], [a.values for a in due]):
            groups, _, width = stores[0].shape
            total = stores[0].new_zeros(1, groups, count, width, dtype=dtype)
            for held, store in zip(due, stores, strict=True):
                first, end = max(held.first, rows.start), min(held.end, rows.stop)
                total[0, :, first - rows.start : end - rows.start] += store[
                    :, first - held.first : end - held.first
                ]
            sums.append(total)
        return sums[0], sums[1]


def _exact_zeros(x: Tensor, lease: Lease) -> Tensor:
    """Zeros in the shape of x[0], in at least float32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return lease.take(x.shape[1:], exact, x.device).zero_()
