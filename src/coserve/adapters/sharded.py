"""Adapters of a base that is cut over ranks: of each matrix a rank has all or a part, as the search says.

Files, messages and saved states have whole adapters, whatever the number of ranks: they are cut where they
come in, and put together where they go out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor
from torch.distributed.tensor import Shard

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.lowrank import EmbeddingLoRA, is_lora
from coserve.errors import AdapterError
from coserve.parallel.bypass_graph import lora_graph
from coserve.parallel.links import LINKS
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut, best_plans
from coserve.parallel.states import SUMMANDS, State


@dataclass(frozen=True, slots=True)
class MatrixShare:
    """A rank's share of a trained matrix: the part along `dim`, or all of it (None), whose gradient
    `is_sum` of what ranks find, or of which others have nothing (`is_alone`)."""

    dim: int | None = None
    is_sum: bool = False
    is_alone: bool = False

    @property
    def is_everywhere(self) -> bool:
        """Tells whether every rank has all of it."""
        return self.dim is None and not self.is_alone


WHOLE = MatrixShare()


@cache
def lora_shares(cut: Cut) -> Mapping[str, MatrixShare]:
    """The shares of a low-rank bypass's matrices beside a linear that is cut so: those of the best plan. It
    is the same for all widths, ranks and links: it sends nothing but one gradient a step."""
    plan = best_plans(lora_graph(2, 2, 1), cut, 2, next(iter(LINKS.values())))[0]
    assert not [*plan.changes()], "no rows are sent between a bypass's products"
    return {f"lora_{step.operator.name}": _share(step.weight, step.weight_gradient) for step in plan.steps}


def _share(weight: State | None, gradient: State | None) -> MatrixShare:
    return MatrixShare(weight.dim if isinstance(weight, Shard) else None, gradient == SUMMANDS)


class AdapterShards:
    """Cuts adapters for one of `ranks`, and puts them together; `cuts` are those of the linears, by path.
    `setting` is the engine's that has it so."""

    setting: ClassVar[str] = "tensor_parallel"
    cuts_linears: ClassVar[bool] = True

    def __init__(self, cuts: Mapping[str, Cut], ranks: Ranks) -> None:
        self._cuts, self.ranks = cuts, ranks

    def expect(self, methods: Sequence[str]) -> None:
        """Raises AdapterError for methods of which ranks cannot make a fresh adapter."""

    def has(self, path: str) -> bool:
        """Tells whether the rank has a part of the module at `path`, a site for adapters."""
        return True

    def cut(self, adapter: AdapterVersion) -> AdapterVersion:
        """The rank's part of an adapter. Raises AdapterError for one that cannot be cut."""
        if self.ranks.count == 1:
            return adapter
        self._refuse(adapter)
        shares = self.shares(adapter)
        return adapter.with_parameters({n: self._part(t, shares[n]) for n, t in adapter.parameters().items()})

    def whole(self, adapter: AdapterVersion) -> AdapterVersion:
        """The whole adapter, given the rank's part. All ranks call this together."""
        if self.ranks.count == 1:
            return adapter
        shares = self.shares(adapter)
        return adapter.with_parameters({n: self._all(t, shares[n]) for n, t in adapter.parameters().items()})

    def cut_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The rank's part of AdamW's state of an adapter's weights."""
        return {name: self._part(t, share) for name, t, share in self._of_moments(adapter, moments)}

    def whole_moments(self, adapter: AdapterVersion, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The whole state. All ranks call this together."""
        return {name: self._all(t, share) for name, t, share in self._of_moments(adapter, moments)}

    def losses(self, found: Sequence[float]) -> Sequence[float]:
        """The losses of micro-batches, given those that this rank has found."""
        return found

    def shares(self, adapter: AdapterVersion) -> Mapping[str, MatrixShare]:
        """The share of each trained tensor, by its name in `AdapterVersion.parameters`."""
        names = iter(adapter.parameters())
        return {
            next(names): lora_shares(self._cuts[place.path]).get(name, WHOLE)
            if place.path in self._cuts
            else WHOLE
            for place, bypass in adapter.placed()
            for name in bypass.parameters()
        }

    def _refuse(self, adapter: AdapterVersion) -> None:
        for place, bypass in adapter.placed():
            if not (is_lora(bypass) or isinstance(bypass, EmbeddingLoRA)):
                raise AdapterError(
                    f"adapter {adapter.name!r} has a {type(bypass).__name__} at {place.path}: with "
                    "engine.tensor_parallel only LoRA without biases is served and trained"
                )

    def _of_moments(
        self, adapter: AdapterVersion, moments: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, MatrixShare]]:
        shares = self.shares(adapter)
        for name, tensor in sorted(moments.items()):
            yield name, tensor, shares[name.rpartition(".")[0]] if tensor.ndim else WHOLE

    def _part(self, tensor: Tensor, share: MatrixShare) -> Tensor:
        if share.dim is None:
            return tensor
        size = tensor.shape[share.dim] // self.ranks.count
        return tensor.narrow(share.dim, self.ranks.number * size, size).clone()  # frees the whole

    def _all(self, tensor: Tensor, share: MatrixShare) -> Tensor:
        return tensor if share.dim is None else self.ranks.whole(tensor, share.dim)
