"""The way back through the model: window by window from the right, layer by layer from the top.

Each layer is re-run on just the window's rows with the earlier keys and values as leaves; one
vector-Jacobian product gives the adapters' gradients, the gradient for the layer's input, and what the
window owes to earlier keys and values. It can be put down after any layer, and cut in two while it lies
there (FlexLLM 6.1, algorithm 2, lines 12-20).
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from coserve.core.grid import COARSE, on_grid
from coserve.core.sequence import Span
from coserve.kernels.attention import AttentionSpec
from coserve.kernels.loss import cross_entropy
from coserve.model.base import Base
from coserve.model.batch import Bypass, LayerCalls
from coserve.model.linear import Placement, frozen
from coserve.train.tape import Tape, Window, attend_window

# Logits of one chunk of the loss in float32: 16 MiB stay in the caches and below malloc's mmap threshold
# (a fresh mapping costs a page fault per 4 KiB).
_LOGITS_PER_CHUNK = 1 << 22

Leaves = Mapping[int, tuple[Tensor, ...]]  # by layer: the parameters that train, in the graph's dtype


class ReplayedRows:
    """One window's rows while a layer is re-run for its gradient; everything else of the base is frozen."""

    def __init__(self, tape: Tape, window: Window, bypasses: Mapping[str, Bypass]) -> None:
        self._tape, self._window, self._bypasses = tape, window, bypasses
        self.past: tuple[Tensor, Tensor] | None = None
        self.current: tuple[Tensor, Tensor] | None = None

    def linear(self, path: str, placement: Placement, x: Tensor) -> Tensor:
        kept = self._tape.product(path, self._window)
        y = frozen(x, placement, None if kept is None else kept.view(*x.shape[:-1], -1))
        bypass = self._bypasses.get(path)
        if bypass is None:
            return y
        return bypass.add(x.flatten(0, -2), y.flatten(0, -2)).view(y.shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.current = (k, v)
        return attend_window(q, k, v, self.past, self._window, spec)


class Walk:
    """The backward pass of one micro-batch. `bypasses` hold `leaves`; `accumulate(leaf, gradient)` takes what
    is found. `weight` scales the loss (one over the labels of the whole optimizer step)."""

    def __init__(
        self, tape: Tape, leaves: Leaves, weight: float, accumulate: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._tape = tape
        self._base: Base = tape.base
        self._leaves = leaves
        self._weight = weight
        self._accumulate = accumulate
        self._lowest = min(leaves, default=self._base.depth)

    def through_tail(self, window: Window) -> None:
        """The loss of the window's rows, and its gradient for the last layer's output, where they wait for
        their way back. Rows without a label cost nothing."""
        labels = self._tape.labels[window.span]
        hidden = self._tape.output(window)[0]
        gradient = torch.zeros_like(hidden)
        rows = (labels >= 0).nonzero().squeeze(1)
        size = max(16, _LOGITS_PER_CHUNK // self._base.vocabulary // COARSE * COARSE)
        for chunk in torch.split(rows, size) if len(rows) else ():
            count = len(chunk)
            missing = on_grid(count) - count
            leaf = F.pad(hidden[chunk], (0, 0, 0, missing))[None].requires_grad_()
            with torch.enable_grad():
                logits = self._base.tail(leaf)
            loss, logits_gradient = cross_entropy(logits.detach()[:count], labels[chunk], self._weight)
            logits_gradient = F.pad(logits_gradient, (0, 0, 0, missing))
            gradient[chunk] = torch.autograd.grad(logits, leaf, logits_gradient)[0][0, :count]
            self._tape.loss += loss
        self._tape.put_down(window, gradient[None])

    def back(self, window: Window, span: Span, bypasses: Mapping[str, Bypass]) -> None:
        """The window's rows back through the layers of `span`, from its last to its first."""
        calls = self._tape.calls_for(window)
        gradient = self._tape.picked_up(window)
        for layer in reversed(range(max(span.first, self._lowest), span.last)):
            rows = ReplayedRows(self._tape, window, bypasses)
            gradient = self._through_layer(layer, window, rows, calls, gradient)
        if span.first > self._lowest:
            self._tape.put_down(window, gradient)

    def _through_layer(
        self, layer: int, window: Window, rows: ReplayedRows, calls: LayerCalls, gradient: Tensor
    ) -> Tensor:
        """Re-runs `layer` and goes back through it: from the gradient for its output to the one for its
        input [1, rows, width]. Below the lowest adapter nobody asks for that, and it stays as it is."""
        leaves = self._leaves.get(layer, ())
        x = self._tape.input(layer, window).detach().requires_grad_(layer > self._lowest)
        past = self._tape.past_cache(layer, window)
        if past is not None:
            past = (past[0].detach().requires_grad_(), past[1].detach().requires_grad_())
        rows.past = past
        with torch.enable_grad(), self._base.cell.set(rows):
            out = self._base.layer(layer, x, calls)
        assert rows.current is not None, "every layer attends"
        outputs, gradients = [out], [gradient]
        owed = self._tape.cache_grads(layer, window, out.dtype)
        if owed is not None:
            outputs += rows.current
            gradients += owed
        asked = [*leaves, *(past or ()), *((x,) if x.requires_grad else ())]
        differentiable = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in differentiable], asked, [g for _, g in differentiable], allow_unused=True
        )
        for leaf, its_gradient in zip(leaves, found, strict=False):
            if its_gradient is not None:  # an expert no row was routed to
                self._accumulate(leaf, its_gradient)
        if past is not None:
            self._tape.add_cache_grads(layer, window, *found[len(leaves) : len(leaves) + 2])
        return found[-1] if x.requires_grad else gradient
