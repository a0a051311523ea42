"""The chain of one stage: the loops over layers, of which some are in other stages.

Every stage runs the same plan. Where its rows come to a layer of another stage, it receives what that one has
computed, or nothing where it needs nothing; what its own last layer gives it sends on. The rows that pass a
border, and their order, follow from the plan, so no message says what it holds.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coserve.model.batch import BatchCell
from coserve.model.chain import Chain, Composed, Returning, T
from coserve.parallel.ranks import Ranks


class StageChain(Chain):
    """The layers `span` of the `whole` chain are here; `ranks` are the stages in order."""

    def __init__(self, whole: Chain, cell: BatchCell, span: range, ranks: Ranks) -> None:
        super().__init__(whole.blocks, whole.ends, cell)
        self.shortcut, self._span, self._ranks = whole.shortcut, span, ranks

    @property
    def span(self) -> range:
        """See `Chain`."""
        return self._span

    def forward(
        self,
        travellers: Sequence[T],
        layers: range | None = None,
        *,
        compose: Callable[[Sequence[T]], Composed],
    ) -> None:
        """See `Chain`. Rows that enter the span are received, and those that leave it sent."""
        layers = range(len(self)) if layers is None else layers
        first, last = self._span.start - 1, self._span.stop - 1
        if first >= 0 and first in layers:
            entering = [one for one in travellers if first in one.layers]
            inputs = [one.input(first + 1) for one in entering]
            for one, hidden in zip(entering, self._received(inputs, self._ranks.number - 1), strict=True):
                one.take(first, hidden)
        here = range(max(layers.start, self._span.start), min(layers.stop, self._span.stop))
        if here:
            super().forward(travellers, here, compose=compose)
        if not self.has_tail and last in layers:
            leaving = [one.input(last + 1) for one in travellers if last in one.layers]
            self._send(leaving, self._ranks.number + 1)
        for one in travellers:
            if reached := range(max(layers.start, one.layers.start), min(layers.stop, one.layers.stop)):
                one.reach(reached.stop)

    def backward(
        self,
        layers: range,
        layer_backward: Callable[[int], object],
        windows: Sequence[Returning] = (),
    ) -> None:
        """See `Chain`. Gradients come from the stage above the span, and go to the one below."""
        for layer in layers:
            there = [window for window in windows if layer in window.layers]
            crossing = [window for window in there if window.needs_input_grad(layer)]
            if layer in self._span:
                super().backward(range(layer, layer - 1, -1), layer_backward, windows)
                if layer == self._span.start > 0:
                    self._send([window.gradient for window in crossing], self._ranks.number - 1)
                continue
            if layer == self._span.stop:
                like = [window.gradient for window in crossing]
                for window, own in zip(crossing, self._received(like, self._ranks.number + 1), strict=True):
                    window.gradient = own
            for window in there:
                window.reached = layer

    def _send(self, rows: Sequence[Tensor], stage: int) -> None:
        """Sends tensors [1, rows, width] to a stage, end to end."""
        if rows:
            self._ranks.send(torch.cat(list(rows), 1), stage)

    def _received(self, like: Sequence[Tensor], stage: int) -> Sequence[Tensor]:
        """Tensors of a stage, as many and as large as these."""
        if not like:
            return ()
        sizes = [x.shape[1] for x in like]
        into = like[0].new_empty(1, sum(sizes), like[0].shape[2])
        return torch.split(self._ranks.receive(into, stage).wait(), sizes, 1)
