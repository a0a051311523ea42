"""The way back through the model: window by window from the right, layer by layer from the top.

Each layer is re-run on just the window's rows with the earlier keys and values as leaves; one
vector-Jacobian product gives the adapters' gradients, the gradient for the layer's input, and what the
window owes to earlier keys and values. It can be put down after any layer, and cut in two while it lies
there (FlexLLM 6.1, algorithm 2, lines 12-20).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.adapters.bypass import Bypasses
from coserve.adapters.sites import EMBEDDED
from coserve.core.row_buckets import COARSE, pad_rows
from coserve.core.sequence import Span
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.loss import cross_entropy
from coserve.model.base import Base
from coserve.model.batch import LayerCalls
from coserve.model.graph import GraphRows, stand_in
from coserve.train.save_policy import Fate
from coserve.train.tape import Tape
from coserve.train.window import Pair, Past, Window, attend_window

# Logits of one chunk of the loss in float32: 16 MiB stay in the caches and below malloc's mmap threshold
# (a fresh mapping costs a page fault per 4 KiB).
_LOGITS_PER_CHUNK = 1 << 22


def loss_rows(vocabulary: int) -> int:
    """Rows of one chunk of the loss."""
    return max(16, _LOGITS_PER_CHUNK // vocabulary // COARSE * COARSE)


Leaves = Mapping[int, tuple[Tensor, ...]]  # by stage: the parameters that train, in the graph's dtype


class ReplayedRows(GraphRows):
    """One window's rows while a layer is re-run for its gradient: what the tape has of them is not computed
    again, nor is what nobody asks for. `current` are the graph's own keys and values, if it has any."""

    def __init__(self, tape: Tape, window: Window, bypasses: Bypasses) -> None:
        super().__init__(bypasses)
        self._tape, self._window = tape, window
        self.past = Past()
        self.current: Pair | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if self.past.shared is not None:
            k, v = self.past.shared
        else:
            self.current = (k, v)
            keys, values = self._tape.cache(layer, self._window)
            k, v = stand_in(k, keys), stand_in(v, values)
        attended = self._tape.attended(layer, self._window)
        return attend_window(q, k, v, self.past, self._window, spec, attended)

    def _kept(self, path: str, x: Tensor) -> tuple[Tensor | None, bool]:
        fate = self._tape.fates.of(path)
        if fate is Fate.COMPUTED:
            return None, False
        shape = (*x.shape[:-1], self._tape.base.linears[path].out_features)
        if fate in (Fate.KEPT, Fate.SUM):
            return self._tape.product(path, self._window).view(shape), fate is Fate.SUM
        return x.new_zeros(()).expand(shape), True

    def _summed(self, path: str, y: Tensor) -> Tensor:
        if self._tape.fates.of(path) is not Fate.SIGN:
            return y
        signed = self._tape.signed(path, self._window, y.flatten(0, -2))
        return stand_in(y, signed.view(y.shape))


class Backward:
    """The backward pass of one micro-batch. `bypasses` hold `leaves`; `accumulate(leaf, gradient)` takes what
    is found. `weight` scales the loss (one over the labels of the whole optimizer step)."""

    def __init__(
        self, tape: Tape, leaves: Leaves, weight: float, accumulate: Callable[[Tensor, Tensor], None]
    ) -> None:
        self.tape = tape
        self._base: Base = tape.base
        self._leaves = leaves
        self._weight = weight
        self._accumulate = accumulate
        self._lowest = min(leaves, default=self._base.depth)

    def through_tail(self, window: Window, bypasses: Bypasses) -> None:
        """The loss of the window's rows, and its gradient for the last layer's output, where they wait for
        their way back. Rows without a label cost nothing."""
        late = self._leaves.get(self._base.depth, ())
        rows_in_graph = GraphRows(bypasses) if late else None
        labels = self.tape.labels[window.span]
        hidden = self.tape.output(window)[0]
        gradient = torch.zeros_like(hidden)
        rows = (labels >= 0).nonzero().squeeze(1)
        size = loss_rows(self._base.vocabulary)
        for chunk in torch.split(rows, size) if len(rows) else ():
            count = len(chunk)
            missing = pad_rows(count) - count
            leaf = F.pad(hidden[chunk], (0, 0, 0, missing))[None].requires_grad_()
            with torch.enable_grad():
                logits = self._base.tail(leaf, rows_in_graph)
            loss, logits_gradient = cross_entropy(logits.detach()[:count], labels[chunk], self._weight)
            logits_gradient = F.pad(logits_gradient, (0, 0, 0, missing))
            found = torch.autograd.grad(logits, [leaf, *late], logits_gradient)
            gradient[chunk] = found[0][0, :count]
            self.add_up(late, found[1:])
            self.tape.loss += loss
        self.tape.put_gradient(window, gradient[None])

    def start(self, window: Window, span: Span, bypasses: Bypasses) -> "BackwardWindow":
        """A window that goes back through layers of `span`, as many as lie above the lowest that trains."""
        layers = range(span.last - 1, max(span.first, self._lowest) - 1, -1)
        calls, gradient = self.tape.calls_for(window), self.tape.picked_up(window)
        return BackwardWindow(self, window, span, layers, bypasses, calls, gradient)

    def finish(self, window: "BackwardWindow") -> None:
        """Puts a window down below the last of its layers, or takes it to what stands before all."""
        if window.span.first > max(self._lowest, 0):
            self.tape.put_gradient(window.window, window.gradient)
        elif self._lowest == EMBEDDED:
            self._through_embedding(window.window, window.bypasses, window.gradient)

    def _through_embedding(self, window: Window, bypasses: Bypasses, gradient: Tensor) -> None:
        """To what stands before the first layer: beside the embedding, and as virtual tokens. What is owed to
        given ones is complete when the leftmost window has come back."""
        leaves = self._leaves[EMBEDDED]
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        with torch.enable_grad():
            if self._enters(bypasses):
                outputs, gradients = [self.tape.embed(window, bypasses)], [gradient]
            if window.start == 0:
                outputs += self.tape.given_in_graph()
                gradients += self.tape.given_grads()
        if outputs:
            self.add_up(leaves, vjp(outputs, gradients, leaves))

    def _enters(self, bypasses: Bypasses) -> bool:
        """Whether anybody asks for the gradient of what the first layer is given for these rows."""
        return bypasses.touches(self._base.early_sites)

    def add_up(self, leaves: tuple[Tensor, ...], gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients of what trains."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:  # an expert no row was routed to
                self._accumulate(leaf, gradient)

    def through_layer(self, layer: int, window: "BackwardWindow") -> None:
        """Re-runs `layer` and goes back through it: from the gradient for its output to the one for its
        input [1, rows, width]."""
        rows = ReplayedRows(self.tape, window.window, window.bypasses)
        leaves = self.leaves(layer)
        asks = window.asks(layer)
        x = window.input(layer).requires_grad_(asks)
        rows.past = self.tape.past(layer, window.window).as_leaves()
        past = rows.past.tensors
        with torch.enable_grad(), self._base.cell.set(rows):
            out = self._base.layer(layer, x, window.calls)
        outputs, gradients = [out], [window.gradient]
        owed = window.owed(layer)
        if owed is not None:
            assert rows.current is not None, "only keys and values of its own are owed anything"
            outputs += rows.current
            gradients += owed
        found = vjp(outputs, gradients, [*leaves, *past, *((x,) if asks else ())])
        own, earlier = found[: len(leaves)], found[len(leaves) : len(leaves) + len(past)]
        window.take(layer, own, earlier, found[-1] if asks else None)

    def leaves(self, layer: int) -> tuple[Tensor, ...]:
        """What trains in a layer."""
        return self._leaves.get(layer, ())

    def asks(self, layer: int, bypasses: Bypasses) -> bool:
        """Whether anybody asks for the gradient of what a layer is given. Below the lowest adapter nobody
        does, and it stays as it is."""
        return layer > self._lowest and (layer > 0 or self._enters(bypasses))


@dataclass(slots=True, eq=False)
class BackwardWindow:
    """A window on its way back through `layers` of `span`, with the gradient [1, rows, width] it has below
    those that it has passed."""

    backward: Backward
    window: Window
    span: Span
    layers: range
    bypasses: Bypasses
    calls: LayerCalls
    gradient: Tensor
    _owed: tuple[int, Pair | None] = (-1, None)

    def stop(self, layer: int) -> None:
        """Ends its way at `layer`, the last one passed; where it has not begun its span becomes empty."""
        if any(below < layer for below in self.layers):
            self.span = Span(min(layer, self.span.last), self.span.last)

    def input(self, layer: int) -> Tensor:
        """What a layer is given, [1, rows, width], outside of any graph."""
        return self.backward.tape.input(layer, self.window, self.bypasses).detach()

    def asks(self, layer: int) -> bool:
        """Whether the gradient of what a layer is given is asked for."""
        return self.backward.asks(layer, self.bypasses)

    def owed(self, layer: int) -> Pair | None:
        """What later windows owe to this one's keys and values in a layer, as often as it is asked for: the
        tape gives it once."""
        if self._owed[0] != layer:
            dtype = self.gradient.dtype
            self._owed = layer, self.backward.tape.cache_grads(layer, self.window, dtype)
        return self._owed[1]

    def take(
        self, layer: int, own: Sequence[Tensor | None], earlier: Sequence[Tensor], below: Tensor | None
    ) -> None:
        """Gradients that its way through a layer gave: of what trains there, of `Tape.past`, and of what the
        layer is given, where anybody asks."""
        self.backward.add_up(self.backward.leaves(layer), own)
        self.backward.tape.add_past_grads(layer, self.window, earlier)
        if below is not None:
            self.gradient = below


def vjp(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], asked: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of what is asked for, given those of the outputs; None (which torch's types do not tell) for
    what nothing depends on."""
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    return torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
