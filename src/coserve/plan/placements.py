"""Prices the placements of a base executor over ranks, for a model that is not loaded.

There are no formulas of placements: the placements themselves run on tensors without data, and what they give
to collectives is counted.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.memory.fake_tensors import fake_tensors
from coserve.model.placement import Placement
from coserve.model.sharded.plan import planned_modules
from coserve.parallel.links import RankLink
from coserve.parallel.ranks import Ranks
from coserve.parallel.states import Change
from coserve.plan.subject import Subject
from coserve.split.cut_linears import PLACEMENTS, LinearsOverRanks, paired_linears
from coserve.split.linears import find_linears, grouped, shape_of


@dataclass(frozen=True, slots=True)
class PricedPlacement:
    """A placement of a model's linears: bytes that a rank keeps, those of the largest weight that it gathers
    (0 where it gathers none), and for a pass through all linears, there and back, the bytes that a rank sends
    and the seconds of that on the link."""

    placement: str
    kept: int
    gathered: int
    forward_sent: int
    back_sent: int
    forward_seconds: float
    back_seconds: float


def price_placements(subject: Subject, ranks: int, link: RankLink, rows: int) -> list[PricedPlacement]:
    """Prices each placement for passes of `rows` rows, of which each feed-forward layer is one call."""
    with fake_tensors():
        return [_Pricing(subject.build(), name, ranks, link, rows).price() for name in PLACEMENTS]


class CountedRanks(Ranks):
    """The first of several ranks, which get the shapes of what they would exchange; it is counted."""

    def __init__(self, count: int, link: RankLink) -> None:
        self.count, self._link = count, link
        self.sent, self.seconds = 0, 0.0

    def sum(self, x: Tensor) -> Tensor:
        return self._counted(Change.REDUCE, 2, x)

    def summed(self, x: Tensor) -> Tensor:
        return self.sum(x)

    def along(self, x: Tensor, dim: int) -> Tensor:
        return self._counted(Change.COMBINE, 1, torch.cat([x] * self.count, dim))

    def of(self, rank: int, x: Tensor) -> Tensor:
        return self._counted(Change.COMBINE, 1, x)  # passed on along a ring

    def _counted(self, change: Change, times: int, whole: Tensor) -> Tensor:
        self.sent += times * (self.count - 1) * whole.nbytes // self.count
        self.seconds += self._link.seconds(change, whole.nbytes, self.count)
        return whole


@dataclass(frozen=True, slots=True)
class _PricedCall:
    """Linears of one input, or those of a feed-forward layer, of which the `last` one gives its output."""

    paths: tuple[str, ...]
    last: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.last,) if self.last else self.paths


class _Pricing:
    """One placement of one model."""

    def __init__(self, model: PreTrainedModel, name: str, ranks: int, link: RankLink, rows: int) -> None:
        self._model, self._name, self._rows = model, name, rows
        self._ranks = CountedRanks(ranks, link)
        self._over = LinearsOverRanks(self._ranks, name == "gathered", torch.device("cpu"))
        self._paired = paired_linears(model, ranks)
        self._linears = {path: linear for path, (_, linear) in find_linears(model).items()}
        shards = self._over.shards(model)
        self._placed = {path: self._place(path, shards) for path in self._linears}

    def price(self) -> PricedPlacement:
        forward, back = self._counted(self._forward), self._counted(self._back)
        kept = sum(called.nbytes for called, _ in self._placed.values())
        sizes = [
            math.prod(shape_of(own)) * self._weight(path).itemsize for path, own in self._linears.items()
        ]
        gathered = max(sizes) if self._over.gathers else 0
        return PricedPlacement(self._name, kept, gathered, forward[0], back[0], forward[1], back[1])

    def _place(self, path: str, shards: Mapping[str, Shard]) -> tuple[Placement, Placement]:
        """The placements of a linear, given a rank's part of it without data."""
        linear, parts, shape = self._linears[path], self._ranks.count, [*shape_of(self._linears[path])]
        if (shard := shards.get(f"{path}.weight")) is not None:
            shape[1 - shard.dim if isinstance(linear, Conv1D) else shard.dim] //= parts
        bias = None
        if isinstance(linear.bias, Tensor):
            bias = self._weight(path).new_empty(
                len(linear.bias) // (parts if f"{path}.bias" in shards else 1)
            )
        return self._over.placed(path, self._weight(path).new_empty(shape), bias)

    def _counted(self, run: Callable[[_PricedCall], None]) -> tuple[int, float]:
        """Bytes and seconds of all calls."""
        self._ranks.sent, self._ranks.seconds = 0, 0.0
        for call in self._calls():
            run(call)
        return self._ranks.sent, self._ranks.seconds

    def _calls(self) -> Iterator[_PricedCall]:
        """Siblings, and feed-forward layers as a whole."""
        styles, layers = dict(planned_modules(self._model)), dict[str, list[str]]()
        for path in sorted(self._paired, key=lambda path: styles[path] == "rowwise"):
            layers.setdefault(path.rpartition(".")[0], []).append(path)
        yield from (_PricedCall((*paths,), paths[-1]) for paths in layers.values())
        alone = {path: shape_of(own) for path, own in self._linears.items() if path not in self._paired}
        yield from (_PricedCall(paths) for paths in grouped(alone))

    def _forward(self, call: _PricedCall) -> None:
        """Does as `RankedLinears.compute`: the first rank's rows go to all, and all have the answer."""
        self._ranks.of(0, self._given(call.paths[0], 1))
        self._products(call)
        if self._over.gathers:
            for path in call.outputs:
                self._ranks.along(self._rows_of(path, 0), 0)

    def _products(self, call: _PricedCall) -> None:
        for path in call.paths:
            called, inside = self._placed[path]
            if call.last and not self._over.gathers:
                x = self._rows_of(path, 1, path == call.last)
                inside.complete(inside.forward(inside.entering(x)))
            else:
                called.forward(self._rows_of(path, 1))

    def _back(self, call: _PricedCall) -> None:
        for path in call.outputs:
            self._ranks.of(0, self._given(path, 0))
        if call.last:  # its inputs come again, and it is computed anew
            self._ranks.of(0, self._given(call.paths[0], 1))
            self._products(call)
        for path in reversed(call.paths):
            called, inside = self._placed[path]
            if call.last and not self._over.gathers:
                grad = inside.backward(self._rows_of(path, 0, path != call.last))
                if path != call.last:  # as `entering` does in a graph
                    self._ranks.sum(grad)
            else:
                called.backward(self._rows_of(path, 0))
        if self._over.gathers:
            self._ranks.along(self._rows_of(call.paths[0], 1), 0)

    def _given(self, path: str, side: int) -> Tensor:
        """All rows of a linear's outputs (side 0) or inputs (1)."""
        return self._weight(path).new_empty(self._rows, shape_of(self._linears[path])[side])

    def _weight(self, path: str) -> Tensor:
        weight = self._linears[path].weight
        assert isinstance(weight, Tensor)
        return weight

    def _rows_of(self, path: str, side: int, is_part: bool = False) -> Tensor:
        """The rows that a rank computes, of all or a part of their numbers."""
        x = self._given(path, side)
        if self._over.gathers:
            return x[: -(-self._rows // self._ranks.count)]
        return x[:, : x.shape[1] // self._ranks.count] if is_part else x
