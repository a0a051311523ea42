"""Modules around which rows change between ranks, beside cut linears: an embedding with some tokens' rows,
experts with some inner features, and linears whose inputs or outputs all ranks have.

The module tree stays the model's own; only the bound `forward` of the module is replaced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coserve.parallel.ranks import Ranks
from coserve.parallel.states import Change


class CutEmbedding:
    """An embedding of which a rank has some tokens' rows: others are zeros there, and all are summed."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._forward: Callable[[Tensor], Tensor] = module.forward
        self._ranks, self._count = ranks, len(weight)
        self._first = ranks.number * self._count

    def __call__(self, tokens: Tensor) -> Tensor:
        places = tokens - self._first
        is_own = (places >= 0) & (places < self._count)
        found = self._forward(places.where(is_own, 0))
        return self._ranks.summed(found.where(is_own[..., None], 0.0))


class CutExperts:
    """Fused experts of which a rank has some inner features of each: what they give is summed over ranks."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._forward: Callable[..., Tensor] = module.forward
        self._ranks = ranks

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        entering = self._ranks.entering
        return self._ranks.summed(self._forward(entering(hidden), index, entering(weights), *rest))


def cut_embedding(module: nn.Module, ranks: Ranks) -> None:
    """Has an embedding whose weight is a part of all rows give all."""
    module.forward = CutEmbedding(module, ranks)


def cut_experts(module: nn.Module, ranks: Ranks) -> None:
    """Has experts whose weights are parts give what the whole ones give."""
    module.forward = CutExperts(module, ranks)


def split_input(module: nn.Module, ranks: Ranks) -> None:
    """Has a linear that is cut by its inputs take a rank's own of those that all ranks have."""
    forward: Callable[[Tensor], Tensor] = module.forward
    module.forward = lambda x: forward(ranks.changed(x, Change.PARTITION, Change.COMBINE))


def share_last(module: nn.Module, width: int, ranks: Ranks) -> None:
    """Has the last columns of what a linear gives, so many, be for the heads of all ranks: each finds a part
    of their gradient. What is before them goes on through linears that are cut, which add up its own."""
    forward: Callable[[Tensor], Tensor] = module.forward

    def shared(x: Tensor) -> Tensor:
        y = forward(x)
        before, last = torch.split(y, [y.shape[-1] - width, width], -1)
        return torch.cat((before, ranks.entering(last)), -1)

    module.forward = shared
