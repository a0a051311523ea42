"""A cut base as methods see it: whole, wherever parts of its weights are.

Ranks give each other what is asked for beside steps, so all of them call this together. A bypass is made of
the whole parameters, and cut then (`adapters/sharded.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from coserve.adapters.bypass import Dense
from coserve.adapters.sites import CutWeights, FrozenParameters, Modules, Sites, Weights
from coserve.attention.backend import CacheShape
from coserve.model.base import Base
from coserve.model.sharded.plan import ShardPlan
from coserve.parallel.ranks import ONE_PIECE, Ranks, join_parts
from coserve.parallel.search import Cut


class WholeParameters(FrozenParameters):
    """Frozen parameters of which a rank has `own` ones."""

    def __init__(self, own: FrozenParameters, sites: Sites, plan: ShardPlan, ranks: Ranks) -> None:
        self._own, self._sites, self._plan, self._ranks = own, sites, plan, ranks

    def dense(self, path: str) -> Dense:
        weight = self._own.dense(path).weight
        if path == self._plan.embedding:
            return Dense(self._ranks.whole(weight, 0), None)
        cut = self._plan.linears.get(path, Cut.WHOLE)
        if cut is Cut.ROWWISE:
            return Dense(self._ranks.whole(weight, 1), self.bias(path))
        return Dense(self._joined(path, weight) if cut is Cut.COLWISE else weight, self.bias(path))

    def bias(self, path: str) -> Tensor | None:
        site, cut = self._sites[path], self._plan.linears.get(path, Cut.WHOLE)
        if not site.has_bias:
            return None
        own = self._own.bias(path)
        if cut is Cut.ROWWISE:  # the first rank has it
            weight = self._own.dense(path).weight
            return self._summed(weight.new_zeros(site.outputs) if own is None else own)
        assert own is not None, "all ranks have a part of it"
        return self._joined(path, own) if cut is Cut.COLWISE else own

    def gain(self, path: str) -> Tensor:
        return self._own.gain(path)

    def embedded(self, tokens: Tensor) -> Tensor:
        if not self._plan.embedding:
            return self._own.embedded(tokens)
        return self.rows(self._plan.embedding, tokens) * self._sites[self._plan.embedding].factor

    def rows(self, path: str, tokens: Tensor) -> Tensor:
        if path != self._plan.embedding:
            return self._own.rows(path, tokens)
        weight = self._own.dense(path).weight
        places = tokens.to(weight.device) - self._ranks.number * len(weight)
        is_own = (places >= 0) & (places < len(weight))
        return self._summed(weight[places.where(is_own, 0)].where(is_own[..., None], 0.0))

    def weights(self, path: str) -> Weights:
        own, cut = self._own.weights(path), self._plan.linears.get(path, Cut.WHOLE)
        if cut is Cut.WHOLE:
            return own

        def norms() -> Tensor:
            found = own.row_norms()
            return self._joined(path, found) if cut is Cut.COLWISE else self._summed(found.square()).sqrt()

        def product(x: Tensor) -> Tensor:
            if cut is Cut.ROWWISE:
                return self._summed(own.forward(self._ranks.columns_of(x).contiguous()))
            return self._joined(path, own.forward(x).t()).t()

        return CutWeights(own, norms, lambda: self.bias(path), product)

    def rounded(self, path: str, weight: Tensor) -> Tensor:
        return self._own.rounded(path, weight)

    def _joined(self, path: str, own: Tensor) -> Tensor:
        """All ranks' outputs."""
        parts = self._ranks.whole(own, 0).chunk(self._ranks.count)
        return join_parts(parts, 0, self._plan.pieces.get(path, ONE_PIECE))

    def _summed(self, own: Tensor) -> Tensor:
        return self._ranks.whole(own[None], 0).sum(0)


class WholeFrame:
    """The `Frame` of a whole base, of which `base` is a rank's part."""

    def __init__(self, base: Base, plan: ShardPlan, ranks: Ranks) -> None:
        self._base, self._count = base, ranks.count if plan.cuts_heads else 1
        self.frozen: FrozenParameters = WholeParameters(base.frozen, base.sites, plan, ranks)

    @property
    def sites(self) -> Sites:
        return self._base.sites

    @property
    def modules(self) -> Modules:
        return self._base.modules

    @property
    def depth(self) -> int:
        return self._base.depth

    @property
    def hidden_size(self) -> int:
        return self._base.hidden_size

    @property
    def caches(self) -> Sequence[CacheShape]:
        """Keys and values of each layer, of all heads."""
        return [replace(cache, groups=cache.groups * self._count) for cache in self._base.caches]

    @property
    def mixers(self) -> Sequence[object]:
        return self._base.mixers
