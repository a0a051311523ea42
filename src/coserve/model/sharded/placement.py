"""Frozen linears of which a rank has a part: some outputs of each row, or some inputs.

A cut linear gives the next one what a rank has; a whole one, of which every rank is given all inputs, gives
all outputs to each.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

from coserve.model.placement import Offer, Placement, PlainPlacement
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
    """Some outputs, of which every rank gets all, but for what is computed `in_parts`: the head's logits."""

    _is_gathered = True

    def complete(self, y: Tensor) -> Tensor:
        return self._ranks.gathered(y) if self._is_gathered else y

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Context in which each rank gets its own outputs alone."""
        self._is_gathered = False
        try:
            yield
        finally:
            self._is_gathered = True


class RowShard(ShardedPlacement):
    """Some inputs, which a rank has from the linear before it: outputs are summed over ranks. The bias is the
    first rank's."""

    def complete(self, y: Tensor) -> Tensor:
        return self._ranks.summed(y)


class WholeColumns(ShardedPlacement):
    """All of a linear's inputs and outputs on every rank, each of which computes some outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.columns(self._own.forward(x))

    def backward(self, grad: Tensor) -> Tensor:
        return self._ranks.sum(self._own.backward(self._ranks.columns_of(grad).contiguous()))


class WholeRows(ShardedPlacement):
    """All of a linear's inputs and outputs on every rank, each of which multiplies some inputs. The bias is
    the first rank's."""

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._own.forward(self._ranks.columns_of(x).contiguous()))

    def backward(self, grad: Tensor) -> Tensor:
        return self._ranks.columns(self._own.backward(grad))


class GatheredWeight(ShardedPlacement):
    """A linear of which a rank keeps a part of the weight, and of the bias where that is cut too, and gathers
    the whole for each product, as FSDP does: ranks compute rows of their own. `dim` is the weight's that is
    cut."""

    def __init__(self, own: PlainPlacement, ranks: Ranks, dim: int) -> None:
        super().__init__(own, ranks)
        self._dim = dim

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if bias is not None and not self._dim:
            bias = self._ranks.along(bias, 0)
        return F.linear(x, self._whole(), bias)

    def backward(self, grad: Tensor) -> Tensor:
        return grad @ self._whole()

    def _whole(self) -> Tensor:
        return self._ranks.along(self._own.weight(), self._dim)
