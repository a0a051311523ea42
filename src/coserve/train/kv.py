"""Keys and values of a micro-batch: those of its rows, virtual ones, and the gradients owed to both."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.adapters.virtual import Virtual
from coserve.memory.arena import Lease
from coserve.train.kv_gradients import KVGradAccumulator, zeros_like_one
from coserve.train.row_buffers import RowBuffers
from coserve.train.window import KV, PastKV, Window


class MicroBatchKV:
    """Keys and values that windows leave for later ones, in every layer.

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
        """Stores k [groups, window rows, dk] and v. Backward may be cut into other windows than forward."""
        for buffers, x in zip(self._own, (k, v), strict=True):
            buffers.write(layer, window.span, x)

    def own(self, layer: int, window: Window) -> KV:
        """The window's own keys and values, [1, groups, rows, width]."""
        return self._at(layer, window.span)

    def past(self, layer: int, window: Window) -> PastKV:
        """Keys and values that the window's rows may attend to beside those that the layer makes of them."""
        source = self._source(layer)
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
        if self.virtual:
            self.virtual.add_grads(source, next(pairs))
        if window.before:
            self._grads.add(source, slice(0, window.before), next(pairs))
        if window.past:
            self._grads.add(source, window.past_span, next(pairs))
        if source != layer:
            self._grads.add(source, window.span, next(pairs))

    def collect_grads(self, layer: int, window: Window, dtype: torch.dtype) -> KV | None:
        """Gradients that later windows have added for this window's own keys and values, [1, groups, rows,
        width]; None if none. To be called once, when the window goes back through the layer."""
        return self._grads.collect(layer, window.span, dtype)

    def _source(self, layer: int) -> int:
        """The layer whose keys and values `layer` attends to."""
        reads = self._reads[layer]
        return layer if reads is None else reads

    def _at(self, layer: int, rows: slice) -> KV:
        keys, values = self._own
        return keys.read(layer, rows)[None], values.read(layer, rows)[None]


class VirtualKV:
    """Virtual keys and values before every example; false where there are none."""

    def __init__(self, virtual: Virtual, lease: Lease) -> None:
        self._virtual, self._lease = virtual, lease
        with torch.no_grad():
            self._given = [(k[None], v[None]) for k, v in virtual.caches()]
        self._grads: dict[int, KV] = {}

    def __bool__(self) -> bool:
        return bool(self._given)

    def of(self, layer: int) -> KV:
        """A layer's, [1, groups, n, width], outside of any graph."""
        return self._given[layer]

    def add_grads(self, layer: int, grads: KV) -> None:
        """Adds gradients [1, groups, n, width] to those of a layer's keys and values."""
        if layer not in self._grads:
            k, v = grads
            self._grads[layer] = zeros_like_one(k, self._lease), zeros_like_one(v, self._lease)
        for total, grad in zip(self._grads[layer], grads, strict=True):
            total += grad[0]

    def in_graph(self) -> list[Tensor]:
        """The keys and values in the current graph, in the order of `grads`."""
        return [tensor for pair in self._virtual.caches() for tensor in pair]

    def grads(self) -> list[Tensor]:
        """Gradients from all windows so far, [groups, n, width]: of each layer the keys', then the
        values'."""
        return [grad for layer in range(len(self._given)) for grad in self._grads[layer]]
