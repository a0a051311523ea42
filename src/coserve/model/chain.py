"""The chain: a model's blocks in order, and all loops that compute layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from coserve.core.sequence import Direction
from coserve.model.batch import BatchCell, LayerCalls, Rows
from coserve.model.block import Block, Call, Ends, ModelPart

_AT_ONCE: Final = 8  # layers of a shortcut: of a large model they take as long as a heartbeat may


class Traveller(Protocol):
    """Rows that pass consecutive layers forward."""

    @property
    def layers(self) -> range:
        """The layers that the rows pass; the range may shrink on the way."""

    def input(self, layer: int) -> Tensor:
        """Input of a layer, [1, rows, width]."""

    def take(self, layer: int, hidden: Tensor) -> None:
        """Receives the layer's output, [1, rows, width]."""

    def reach(self, layer: int) -> None:
        """Learns that the rows have passed all layers below this one, of which some may be in other stages
        of a pipeline."""


class Returning(Protocol):
    """Rows on their way back: `gradient` [1, rows, width] is for the input of the layer that they have
    `reached`."""

    layers: range
    gradient: Tensor
    reached: int | None

    def needs_input_grad(self, layer: int) -> bool:
        """Tells whether the rows go on below the layer."""


T = TypeVar("T", bound=Traveller)
Composed = tuple[Rows, LayerCalls]  # the rows in a run, and the layers' other arguments


class Chain:
    """The blocks of one model, and its `ends`. `on_layer` is called before each block, in either direction,
    as a heartbeat during long steps. `shortcut` is a faster way through neighbouring blocks that are given
    the same arguments; it gives None where it does not lead there."""

    def __init__(self, blocks: Sequence[Block], ends: Ends, cell: BatchCell) -> None:
        self.blocks, self.ends = tuple(blocks), ends
        self.on_layer: Callable[[], object] = int  # nothing
        self.shortcut: Callable[[Sequence[Block], Tensor, Call], Tensor | None] | None = None
        self._cell = cell

    @property
    def span(self) -> range:
        """The layers that are in this process."""
        return range(len(self))

    @property
    def has_tail(self) -> bool:
        """Tells whether the last layer, and so the tail, is in this process."""
        return self.span.stop == len(self)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def part_of(self, path: str) -> ModelPart:
        """The block that has the module at `path`, or the ends."""
        return next((block for block in self.blocks if block.holds(path)), self.ends)

    def layer(
        self, index: int, hidden: Tensor, calls: LayerCalls, direction: Direction = Direction.INFER
    ) -> Tensor:
        """One layer on hidden [1, rows, width], within a visit; the base's cell holds the rows."""
        self.on_layer()
        with self.blocks[index].visit(direction):
            return self.blocks[index].run(hidden, calls[index])

    def run(self, hidden: Tensor, calls: LayerCalls) -> Tensor:
        """All layers on hidden [1, rows, width]."""
        for index in range(len(self)):
            hidden = self.layer(index, hidden, calls)
        return hidden

    def forward(
        self,
        travellers: Sequence[T],
        layers: range | None = None,
        *,
        compose: Callable[[Sequence[T]], Composed],
    ) -> None:
        """Runs travellers forward through those of `layers` (None: all) that they pass: each joins at its
        first layer and leaves after its last; those at one layer share its run. `compose` is called whenever
        the set of travellers changes."""
        together: list[T] = []
        composed: Composed | None = None
        layer, end = (0, len(self)) if layers is None else (layers.start, layers.stop)
        while layer < end:
            active = [traveller for traveller in travellers if layer in traveller.layers]
            if not active:
                layer += 1
                continue
            if composed is None or list(map(id, active)) != list(map(id, together)):
                together, composed = active, compose(active)
            rows, calls = composed
            inputs = [traveller.input(layer) for traveller in active]
            with self._cell.set(rows):
                hidden = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
                # Only who travels alone neither meets nor leaves anybody on the way.
                most = _AT_ONCE if len(travellers) == 1 else 1
                stop = min(layer + most, active[0].layers.stop, end)
                out, count = self._at_once(range(layer, stop), hidden, calls), stop - layer
                if out is None:
                    out, count = self.layer(layer, hidden, calls), 1
            # Padding rows are part of the first traveller's input.
            parts = torch.split(out, [x.shape[1] for x in inputs], 1) if len(inputs) > 1 else (out,)
            layer += count
            for traveller, part in zip(active, parts, strict=True):
                traveller.take(layer - 1, part)

    def _at_once(self, layers: range, hidden: Tensor, calls: LayerCalls) -> Tensor | None:
        """The output of several layers where there is a shortcut; None else."""
        if self.shortcut is None or len(layers) < 2 or not calls.is_one(layers):
            return None
        out = self.shortcut(self.blocks[layers.start : layers.stop], hidden, calls[layers.start])
        if out is not None:
            self.on_layer()
        return out

    def backward(
        self,
        layers: range,
        layer_backward: Callable[[int], object],
        windows: Sequence[Returning] = (),
    ) -> None:
        """Visits layers in this order, from the top down; `layer_backward` computes one for the `windows`
        that pass it."""
        for layer in layers:
            with self.blocks[layer].visit(Direction.BACKWARD):
                layer_backward(layer)
