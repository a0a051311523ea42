"""Backward of training windows: from the top layer down, windows at the same layer in groups.

Each layer is re-run on the rows of a window group, with earlier keys and values as leaves of the graph. One
vector-Jacobian product gives the gradients of the adapters' parameters, of the layer's input, and of earlier
keys and values, which wait for the windows of those rows. A window may rest after any layer, and be cut in
two while it rests (FlexLLM 6.1, algorithm 2, lines 12-20). A layer that an arrival has abandoned leaves
windows as they were.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.adapters.activation import acts
from coserve.adapters.bypass import Bypasses
from coserve.adapters.sites import EMBEDDED
from coserve.attention.states import States, mixers_in
from coserve.core.sequence import Direction, Span
from coserve.kernels.rows import concat_rows, split_rows
from coserve.memory.exhausted import together
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.train.activations import ActivationStore
from coserve.train.native_backward import ReplayedLayer, native_gradients, recognised
from coserve.train.shortage import Shortages
from coserve.train.states import StateGrads
from coserve.train.window import KV, Window
from coserve.train.window_group import ReplayedRows

JobWindow = tuple[str, "BackwardWindow"]  # a window, and the job it belongs to
Leaves = Mapping[int, tuple[Tensor, ...]]  # by stage: the parameters that train, in the graph's dtype


def backward_layers(
    layers: range,
    windows: Sequence[JobWindow],
    max_rows: int,
    short: Shortages,
    check: Callable[[], object] = int,
) -> None:
    """Takes windows, each with its job, back through those of `layers` that they pass, from the top down, in
    groups of at most `max_rows` rows. A job that fails or runs out of memory stops there; other jobs go on.
    Where `check` raises LayerAbandoned, or the pass of a group fails (PassFailed), its windows are as they
    were above that layer."""

    def go(layer: int) -> None:
        for group in _groups(layer, windows, max_rows):
            _backward_group(layer, group, short, check)

    chain = windows[0][1].backward.store.base.chain
    chain.backward(layers, go, [window for _, window in windows])


def _groups(layer: int, windows: Sequence[JobWindow], max_rows: int) -> Iterator[list[JobWindow]]:
    """Groups windows at this layer: distinct jobs, at most `max_rows` rows (one window may have more), same
    `needs_input_grad`."""
    for needs_input_grad in (True, False):
        group: list[JobWindow] = []
        rows = 0
        for job, window in windows:
            if layer not in window.layers or window.needs_input_grad(layer) is not needs_input_grad:
                continue
            if group and (rows + window.window.rows > max_rows or job in (other for other, _ in group)):
                yield group
                group, rows = [], 0
            group.append((job, window))
            rows += window.window.rows
        if group:
            yield group


def _backward_group(
    layer: int, group: Sequence[JobWindow], short: Shortages, check: Callable[[], object]
) -> None:
    """Takes a group back through a layer in one pass; where that fails for another reason than memory, each
    of its windows in one of its own, which only the job fails that is the cause."""
    group = [window for window in group if window[0] not in short]  # a job may have failed at another window
    found: list[LayerGradients] = []
    if len(group) > 1:
        with together(f"windows of several jobs in layer {layer}, on their way back"):
            found = layer_gradients(layer, [window for _, window in group], check)
    for number, (job, window) in enumerate(group):
        with short.of(job):
            gradients = found[number] if found else layer_gradients(layer, [window], check)[0]
            window.accumulate(layer, gradients)


class LayerGradients(NamedTuple):
    """Gradients of one window's pass back through a layer: of the parameters that train there (None for those
    without influence), of the tensors of `MicroBatchKV.past`, of the layer's input [1, rows, width] where it
    is needed, and of the states before the window, by mixer."""

    leaves: Sequence[Tensor | None]
    past: Sequence[Tensor]
    input: Tensor | None
    states: Mapping[int, StateGrads]


def layer_gradients(
    layer: int, windows: "Sequence[BackwardWindow]", check: Callable[[], object] = int
) -> list[LayerGradients]:
    """Re-runs a layer for a window group, and its backward; returns each window's gradients. The windows do
    not change, so that a failed pass can be repeated. All of them have the same `needs_input_grad`. `check`
    is called between products, and may raise LayerAbandoned."""
    base = windows[0].backward.store.base
    stored = [(w.backward.store, w.window) for w in windows]
    past = [store.kv.past(layer, window).as_leaves() for store, window in stored]
    needs_input_grad = windows[0].needs_input_grad(layer)
    x = concat_rows([w.input(layer) for w in windows], 1).requires_grad_(needs_input_grad)
    states = [_states_before(layer, w) for w in windows]
    rows = ReplayedRows(stored, [w.bypasses for w in windows], past, check, states)
    kv_grads = _kv_grads(layer, windows, rows) if base.caches[layer].reads is None else None
    gradient = concat_rows([w.gradient for w in windows], 1)
    leaves = [w.backward.leaves(layer) for w in windows]
    trained = [leaf for own in leaves for leaf in own]
    earlier = [kv for own in past for kv in own.tensors]
    calls = base.arguments.concat([w.calls for w in windows])
    block = base.chain.blocks[layer]
    every: Sequence[Tensor] | None = None
    with block.visit(Direction.BACKWARD):
        native = recognised(block, [(w.bypasses, own) for w, own in zip(windows, leaves, strict=True)])
        if native is not None:
            base.chain.on_layer()
            given = ReplayedLayer(x.detach(), calls[layer], gradient, kv_grads, earlier)
            every = native_gradients(native, rows, given, trained, needs_input_grad)
    if every is None:
        with torch.enable_grad(), base.cell.set(rows):
            outputs, gradients = [base.chain.layer(layer, x, calls, Direction.BACKWARD)], [gradient]
        if rows.current is not None and kv_grads is not None:
            outputs += rows.current
            gradients += kv_grads
        for state, gradient in _owed_states(windows, rows):
            outputs.append(state)
            gradients.append(gradient)
        begun = [state for own in states for kept in own.values() for state in kept]
        every = vjp(outputs, gradients, [*trained, *earlier, *begun, *[x] * needs_input_grad])
    found = iter(every)
    of_leaves = [list(islice(found, len(own))) for own in leaves]
    of_past = [list(islice(found, len(own.tensors))) for own in past]
    of_states = [{number: tuple(islice(found, len(kept))) for number, kept in own.items()} for own in states]
    of_input = split_rows(next(found), rows.sizes, 1) if needs_input_grad else [None] * len(windows)
    return [LayerGradients(*own) for own in zip(of_leaves, of_past, of_input, of_states, strict=True)]


def _states_before(layer: int, window: "BackwardWindow") -> dict[int, States]:
    """The states before a window in a layer, by mixer, as leaves of a graph; none where an example begins."""
    store = window.backward.store
    mixers = mixers_in(layer, store.base.mixers)
    kept = {mixer.number: store.states.before(mixer.number, window.window) for mixer in mixers}
    return {
        number: tuple(state.detach().requires_grad_() for state in states)
        for number, states in kept.items()
        if states is not None
    }


def _owed_states(windows: "Sequence[BackwardWindow]", rows: ReplayedRows) -> Iterator[tuple[Tensor, Tensor]]:
    """States in the graph after windows, each with its gradient from the window behind."""
    for number, after in rows.left.items():
        for own, left in zip(windows, after, strict=True):
            owed = own.backward.store.states.owed(number, own.window)
            for state, gradient in zip(left, owed or (), strict=owed is not None):
                if gradient is not None:
                    yield state, gradient


def _kv_grads(layer: int, windows: "Sequence[BackwardWindow]", rows: ReplayedRows) -> KV | None:
    """Gradients from later windows for the keys and values of all rows, [1, groups, rows, width]; None if
    there are none."""
    found = [w.kv_grads(layer) for w in windows]
    if all(own is None for own in found):
        return None
    keys, values = (split_rows(x, rows.sizes, 2) for x in rows.own(layer))
    pairs = [
        (torch.zeros_like(k), torch.zeros_like(v)) if own is None else own
        for own, k, v in zip(found, keys, values, strict=True)
    ]
    return concat_rows([k for k, _ in pairs], 2), concat_rows([v for _, v in pairs], 2)


class Backward:
    """Backward of one micro-batch through its layers. `leaves` are the trained tensors of the windows'
    bypasses; `accumulate(leaf, gradient)` is called with each gradient found."""

    def __init__(
        self,
        store: ActivationStore,
        leaves: Leaves,
        accumulate: Callable[[Tensor, Tensor], None],
        lowest: int | None = None,
    ) -> None:
        """`lowest` is the lowest stage that trains, where that is on another rank."""
        self.store = store
        self._base: Base = store.base
        self._leaves = leaves
        self._accumulate = accumulate
        self._lowest = min(leaves, default=self._base.depth) if lowest is None else lowest

    def start(self, window: Window, span: Span, bypasses: Bypasses) -> "BackwardWindow":
        """A window on its way back through the layers of `span`, down to the lowest that trains. One on whose
        rows the adapter does not act passes none: nothing that trains is before these rows."""
        lowest = max(span.first, self._lowest) if acts(bypasses) else span.last
        layers = range(span.last - 1, lowest - 1, -1)
        calls, gradient = self.store.calls_for(window), self.store.hidden.gradient(window)
        return BackwardWindow(self, window, span, layers, bypasses, calls, gradient)

    def finish(self, window: "BackwardWindow") -> None:
        """Stores the window's gradient if layers remain below its span; else continues to the parameters that
        train before the first layer."""
        if window.passed.first > max(self._lowest, 0):
            self.store.hidden.save_gradient(window.window, window.gradient)
        elif EMBEDDED in self._leaves:
            self._through_embedding(window.window, window.bypasses, window.gradient)

    def _through_embedding(self, window: Window, bypasses: Bypasses, gradient: Tensor) -> None:
        """Backward of the embedding's bypasses and of virtual tokens. Gradients of virtual keys and values
        are complete after the leftmost window. Stages of a pipeline behind the first one have virtual tokens
        alone, and of prompts no gradient: zeros, as gradients are summed over stages."""
        leaves = self._leaves[EMBEDDED]
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        is_first, touches = not self._base.chain.span.start, bypasses.touches(self._base.early_sites)
        with self._base.chain.ends.visit(Direction.BACKWARD):
            with torch.enable_grad():
                if touches and is_first:
                    outputs, gradients = [self.store.embed(window, bypasses)], [gradient]
                if window.start == 0:
                    outputs += self.store.kv.virtual.in_graph()
                    gradients += self.store.kv.virtual.grads()
            found = vjp(outputs, gradients, leaves) if outputs else (None,) * len(leaves)
            if touches and not is_first:
                found = tuple(
                    torch.zeros_like(leaf) if own is None else own
                    for leaf, own in zip(leaves, found, strict=True)
                )
            self.accumulate(leaves, found)

    def accumulate(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients to those of the leaves."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:  # None for an expert without rows
                self._accumulate(leaf, gradient)

    def leaves(self, layer: int) -> tuple[Tensor, ...]:
        """The parameters that train in a layer."""
        return self._leaves.get(layer, ())

    def needs_input_grad(self, layer: int, bypasses: Bypasses) -> bool:
        """Tells whether anything trains below the layer, so that the gradient of its input is needed."""
        return layer > self._lowest and (layer > 0 or bypasses.touches(self._base.early_sites))


@dataclass(slots=True, eq=False)
class BackwardWindow:
    """A window on its way back through `layers` of `span`. `gradient` [1, rows, width] is for the input of
    the layer passed last (`reached`), or for the output of the span's last layer."""

    backward: Backward
    window: Window
    span: Span
    layers: range
    bypasses: Bypasses
    calls: LayerCalls
    gradient: Tensor
    reached: int | None = None

    @property
    def passed(self) -> Span:
        """The layers passed so far, and those of the span below all that train."""
        reached = self.span.last if self.reached is None else self.reached
        is_through = all(below >= reached for below in self.layers)
        return self.span if is_through else Span(reached, self.span.last)

    def input(self, layer: int) -> Tensor:
        """The layer's input, [1, rows, width], outside of any graph."""
        return self.backward.store.input(layer, self.window, self.bypasses).detach()

    def needs_input_grad(self, layer: int) -> bool:
        """As `Backward.needs_input_grad`."""
        return self.backward.needs_input_grad(layer, self.bypasses)

    def kv_grads(self, layer: int) -> KV | None:
        """Gradients from later windows for this window's keys and values."""
        return self.backward.store.kv.grads(layer, self.window, self.gradient.dtype)

    def accumulate(self, layer: int, gradients: LayerGradients) -> None:
        """Adds the gradients of the window's pass through a layer to those of parameters, of earlier keys and
        values, and of the state before it, and moves the window below the layer."""
        kv = self.backward.store.kv
        self.backward.accumulate(self.backward.leaves(layer), gradients.leaves)
        kv.drop_grads(layer, self.window)
        kv.add_past_grads(layer, self.window, gradients.past)
        for mixer in mixers_in(layer, self.backward.store.base.mixers):
            self.backward.store.states.owe(mixer.number, self.window, gradients.states.get(mixer.number, ()))
        self.reached = layer
        if gradients.input is not None:
            self.gradient = gradients.input


def vjp(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], asked: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients for `asked`, given those for the outputs; None (absent from torch's types) for tensors on
    which no output depends."""
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    return torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
