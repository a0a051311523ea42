"""The memory that graphs of training read and write: one layer of one window at a time.

A graph has the addresses of its tensors for good, and each micro-batch has its own. So a graph runs what any
window runs on a store of its own: the window's tensors are copied into it, and what comes of them out of it.
Rows beyond the window's are zeros, so that no number of an earlier window's is multiplied with anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from coserve.adapters.bypass import Bypasses
from coserve.adapters.lowrank import LoRABypass
from coserve.adapters.virtual import Virtual
from coserve.attention.backend import CacheShape
from coserve.core.sequence import Span
from coserve.memory.arena import Arena, Lease
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.train.activations import ActivationStore, HiddenStates, SavedOutputs
from coserve.train.backward import Backward, BackwardWindow, LayerGradients
from coserve.train.kv import MicroBatchKV, VirtualKV
from coserve.train.row_buffers import K, RowBuffers
from coserve.train.states import MicroBatchStates
from coserve.train.window import KV, PastKV, Window
from coserve.train.window_group import ForwardWindow

_NOBODYS: Final = -1  # example of the rows behind a window's
_UNREAD: Final = -2  # and of those before the first one that it reads


@dataclass(frozen=True, slots=True)
class GraphedLayer:
    """A layer as graphs see it: its number, the paths of its frozen linears, its cache, and the low-rank
    bypasses that an adapter in training has there, by path."""

    number: int
    paths: Sequence[str]
    cache: CacheShape
    bypasses: Mapping[str, LoRABypass]

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices of the bypasses: of each first A, then B."""
        return [matrix for bypass in self.bypasses.values() for matrix in (bypass.a, bypass.b)]


class GraphStore(ActivationStore):
    """Activations of one layer of a window with up to `rows` rows, and up to `past` rows before them. Layers
    of one kind, with bypasses of the same shapes of which the same is kept, take turns in it: `like` is one
    of them."""

    def __init__(
        self, base: Base, rows: int, past: int, like: GraphedLayer, names: Mapping[str, str]
    ) -> None:
        """`names` are those of frozen linears within their layers, by path."""
        self.base, self.lengths, self.rows, self.prompt = base, (rows,), rows, 0
        self._past, self._lease = past, Lease(Arena())
        examples = torch.full((past + rows,), _NOBODYS, dtype=torch.int32, device=base.device)
        self._examples, self._whole = examples, Window(past, rows, past, (rows,), examples=examples)
        tokens = torch.zeros(rows, dtype=torch.long, device=base.device)
        embedded, calls = base.prologue(tokens, tokens)
        self._own_calls = LayerCalls(tree_map(_copied, calls.calls), calls.index)
        self._entering, self._gradient = torch.zeros_like(embedded), torch.zeros_like(embedded)
        self.leaving = torch.zeros_like(embedded)  # the layer's output, or its input's gradient
        self._matrices = [torch.zeros_like(matrix) for matrix in like.matrices]
        self._found = [torch.zeros_like(matrix) for matrix in like.matrices]
        self.hidden = _GraphHidden(self.leaving)
        self.saved = self._own_saved = _GraphSaved(rows, past, self._lease, names, base.depth)
        self.kv = self._own_kv = _GraphKV(past, embedded, like.cache, self._lease)
        self.states = MicroBatchStates((rows,), self._lease)
        self._held: object = None  # the window whose examples and arguments are here

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds; those of outputs that a layer keeps are there after its first
        window."""
        arguments = [held for held in tree_leaves(self._own_calls.calls) if isinstance(held, Tensor)]
        own = [self._examples, self._entering, self._gradient, self.leaving]
        tensors = [*own, *self._matrices, *self._found, *arguments, *self._own_kv.tensors]
        return self._lease.nbytes + sum(tensor.nbytes for tensor in tensors)

    def input(self, layer: int, window: Window, bypasses: Bypasses) -> Tensor:
        """See `ActivationStore`."""
        return self._entering

    def forward_window(self, layer: GraphedLayer) -> ForwardWindow:
        """The window that a graph takes forward through a layer."""
        bypasses = Bypasses({}, self._bypasses(layer)[0])
        layers = range(layer.number, layer.number + 1)
        return ForwardWindow(layers, self, self._whole, bypasses, self._own_calls)

    def backward_window(self, layer: GraphedLayer, goes_on: bool) -> BackwardWindow:
        """The window that a graph takes back through a layer, to its input where it `goes_on` below."""
        outputs, leaves = self._bypasses(layer)
        span, layers = Span(layer.number, layer.number + 1), range(layer.number, layer.number - 1, -1)
        backward = Backward(self, {layer.number: tuple(leaves)}, _nowhere, layer.number - goes_on)
        bypasses = Bypasses({}, outputs)
        return BackwardWindow(backward, self._whole, span, layers, bypasses, self._own_calls, self._gradient)

    def load(self, layer: GraphedLayer, window: ForwardWindow | BackwardWindow) -> None:
        """Takes what a graph reads of a window in a layer."""
        own, rows = window.window, slice(self._past, self._past + window.window.rows)
        store = window.store if isinstance(window, ForwardWindow) else window.backward.store
        if self._held is not window:
            self._held = window
            self._take_rows(own, window.calls)
        self.saved.fates = store.saved.fates
        _fill(self._entering, window.input(layer.number), 1)
        if layer.matrices:
            torch._foreach_copy_(self._matrices, layer.matrices)
        self._own_kv.fill_past(own.past, store.kv.past(layer.number, own).own)
        if isinstance(window, BackwardWindow):
            _fill(self._gradient, window.gradient, 1)
            self._own_kv.fill_own(store.kv.own(layer.number, own))
            self._own_kv.owe(window.kv_grads(layer.number))
            store.saved.copy_to(self.saved, layer.number, layer.paths, own.span, rows)
            self._own_saved.clear_behind(own.rows)

    def put_forward(self, layer: GraphedLayer, window: ForwardWindow) -> None:
        """Gives a window what a graph has made of its rows."""
        store, own, rows = window.store, window.window, slice(self._past, self._past + window.window.rows)
        keys, values = self.kv.own(layer.number, Window(self._past, own.rows, 0, ()))
        store.kv.save(layer.number, own, keys[0], values[0])
        self.saved.copy_to(store.saved, layer.number, layer.paths, rows, own.span)
        window.take(layer.number, self.leaving[:, : own.rows])

    def keep(self, found: LayerGradients) -> Tensor:
        """Keeps a graph's gradients for `put_back`."""
        for held, gradient in zip(self._found, found.leaves, strict=True):
            held.zero_() if gradient is None else held.copy_(gradient)
        for held, gradient in zip(self._own_kv.of_past, found.past, strict=True):
            held.copy_(gradient)
        if found.input is not None:
            self.leaving.copy_(found.input)
        return self.leaving

    def put_back(self, layer: GraphedLayer, window: BackwardWindow, goes_on: bool) -> None:
        """Gives a window the gradients of its rows."""
        own, of = window.window, {id(m): g for m, g in zip(layer.matrices, self._found, strict=True)}
        leaves = [of[id(leaf)] for leaf in window.backward.leaves(layer.number)]
        past = [one[:, :, self._past - own.past :] for one in self._own_kv.of_past] if own.past else []
        of_input = self.leaving[:, : own.rows].clone() if goes_on else None
        window.accumulate(layer.number, LayerGradients(leaves, past, of_input, {}))

    def _take_rows(self, window: Window, calls: LayerCalls) -> None:
        """Takes the examples of a window's rows, and the layers' arguments for them."""
        numbers = [_UNREAD] * (self._past - window.past) + [0] * window.past
        for number, count in enumerate(window.pieces):
            numbers += [number] * count
        numbers += [_NOBODYS] * (len(self._examples) - len(numbers))
        # What the host has written is copied aside at once, so it does not wait.
        self._examples.copy_(torch.tensor(numbers, dtype=torch.int32), non_blocking=True)
        own = self.base.arguments.narrow(self._own_calls, 0, window.rows)
        for held, given in zip(tree_leaves(own.calls), tree_leaves(calls.calls), strict=True):
            if isinstance(held, Tensor):
                held.copy_(given)

    def _bypasses(self, layer: GraphedLayer) -> tuple[dict[str, LoRABypass], list[Tensor]]:
        """The layer's bypasses with the store's matrices as leaves of a graph, and these in their order."""
        leaves = [matrix.detach().requires_grad_() for matrix in self._matrices]
        pairs = zip(leaves[::2], leaves[1::2], layer.bypasses.items(), strict=True)
        return {path: LoRABypass(a, b, own.scale) for a, b, (path, own) in pairs}, leaves


class _GraphHidden(HiddenStates):
    """The output of the layer under way."""

    def __init__(self, leaving: Tensor) -> None:
        self._leaving = leaving

    def save(self, layer: int, window: Window, hidden: Tensor) -> None:
        """See `HiddenStates`."""
        self._leaving[0].copy_(hidden)


class _LayerBuffers(RowBuffers[K]):
    """Buffers of one layer at a time, under names that all layers share, of rows from `first` on."""

    def __init__(self, rows: int, lease: Lease, first: int, names: Mapping[K, K]) -> None:
        super().__init__(rows, lease)
        self._first = first
        self._names: Mapping[K, K] = names

    def _named(self, key: K) -> K:
        return self._names.get(key, key)

    def _placed(self, rows: slice) -> slice:
        return slice(rows.start - self._first, rows.stop - self._first)

    def clear_behind(self, rows: int) -> None:
        """Makes the rows behind so many zeros."""
        for buffer in self._buffers.values():
            buffer[rows:].zero_()


class _GraphSaved(SavedOutputs):
    """Kept outputs of the layer under way."""

    def __init__(self, rows: int, first: int, lease: Lease, names: Mapping[str, str], depth: int) -> None:
        layers = dict.fromkeys(range(depth), 0)
        self._linears: _LayerBuffers[str] = _LayerBuffers(rows, lease, first, names)
        self._attended: tuple[_LayerBuffers[int], _LayerBuffers[int]] = (
            _LayerBuffers(rows, lease, first, layers),
            _LayerBuffers(rows, lease, first, layers),
        )

    def clear_behind(self, rows: int) -> None:
        """Makes the rows behind so many zeros."""
        for buffers in (self._linears, *self._attended):
            buffers.clear_behind(rows)


class _GraphKV(MicroBatchKV):
    """Keys and values of the layer under way: of `past` rows and those of a window. `of_past` are the
    gradients of the first."""

    def __init__(self, past: int, embedded: Tensor, cache: CacheShape, lease: Lease) -> None:
        self.virtual, self._past = VirtualKV(Virtual(""), lease), past
        rows, widths = embedded.shape[1], (cache.key, cache.value)

        def zeros(count: int) -> list[Tensor]:
            return [embedded.new_zeros(1, cache.groups, count, width) for width in widths]

        self._rows, self._owed = zeros(past + rows), zeros(rows)
        self.of_past = zeros(past) if past else []
        self._is_owed = False

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [*self._rows, *self._owed, *self.of_past]

    def save(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """See `MicroBatchKV`."""
        for held, x in zip(self._rows, (k, v), strict=True):
            held[0, :, window.span].copy_(x)

    def own(self, layer: int, window: Window) -> KV:
        """See `MicroBatchKV`."""
        keys, values = self._rows
        return keys[:, :, window.span], values[:, :, window.span]

    def past(self, layer: int, window: Window) -> PastKV:
        """See `MicroBatchKV`."""
        keys, values = self._rows
        return (
            PastKV(own=(keys[:, :, window.past_span], values[:, :, window.past_span]))
            if self._past
            else PastKV()
        )

    def grads(self, layer: int, window: Window, dtype: torch.dtype) -> KV | None:
        """See `MicroBatchKV`."""
        return (self._owed[0], self._owed[1]) if self._is_owed else None

    def fill_past(self, rows: int, given: KV | None) -> None:
        """Takes those of so many rows before the window."""
        for number, held in enumerate(self._rows):
            held[:, :, : self._past - rows].zero_()
            if given is not None:
                held[:, :, self._past - rows : self._past].copy_(given[number])

    def fill_own(self, given: KV) -> None:
        """Takes those of a window's rows."""
        for held, x in zip(self._rows, given, strict=True):
            _fill(held[:, :, self._past :], x, 2)

    def owe(self, owed: KV | None) -> None:
        """Takes the gradients from later windows for the keys and values of the window's rows."""
        self._is_owed = owed is not None
        for held, x in zip(self._owed, owed or (), strict=owed is not None):
            _fill(held, x, 2)


def _fill(held: Tensor, given: Tensor, dim: int) -> None:
    """Copies what is given to the front of a tensor's dimension, and makes the rest zeros."""
    rows = given.shape[dim]
    held.narrow(dim, 0, rows).copy_(given)
    if rows < held.shape[dim]:
        held.narrow(dim, rows, held.shape[dim] - rows).zero_()


def _copied(x: Any) -> Any:
    """A tensor of the store's own in place of one that the model made."""
    return x.clone() if isinstance(x, Tensor) else x


def _nowhere(leaf: Tensor, gradient: Tensor) -> None:
    """A graph's gradients are not added to any."""
    raise AssertionError("a window of the job adds them")
