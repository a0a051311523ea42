"""Frozen linears of which a rank has a part: some outputs of each row, or some inputs."""

from collections.abc import Mapping

from torch import Tensor

from coserve.model.placement import Offer, Placement
from coserve.parallel.ranks import Ranks


class ShardedPlacement(Placement):
    """A part of a frozen linear. `forward` and `backward` are the rank's own products; `entering` and
    `complete` make them those of the whole linear, together with the bypasses added in between."""

    # Of the rank's own part; those of whole weights are `whole.WholeParameters`.
    offers = frozenset(Offer)

    def __init__(self, own: Placement, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self.bias = own.bias
        self.backward_nbytes = own.backward_nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self._own.forward(x)

    def backward(self, grad: Tensor) -> Tensor:
        return self._own.backward(grad)

    def weight(self) -> Tensor:
        return self._own.weight()

    def row_norms(self) -> Tensor:
        return self._own.row_norms()

    def tensors(self) -> Mapping[str, Tensor]:
        return self._own.tensors()

    def moved(self) -> None:
        self._own.moved()


class ColumnShard(ShardedPlacement):
    """Some outputs: each rank has all of the input, and the next linear takes what a rank has."""

    def entering(self, x: Tensor) -> Tensor:
        return self._ranks.entering(x)


class GatheredColumnShard(ColumnShard):
    """Some outputs, of which every rank gets all: the head's logits."""

    def complete(self, y: Tensor) -> Tensor:
        return self._ranks.gathered(y)


class RowShard(ShardedPlacement):
    """Some inputs, which a rank has from the linear before it: outputs are summed over ranks. The bias is the
    first rank's."""

    def complete(self, y: Tensor) -> Tensor:
        return self._ranks.summed(y)
