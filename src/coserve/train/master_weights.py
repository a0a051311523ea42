"""Master weights of an adapter in training, with its optimizer, and the versions published of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.adapters.loaded import LoadedAdapters
from coserve.adapters.sites import Site
from coserve.model.base import Base
from coserve.parallel.ranks import Ranks
from coserve.train.optim import Optimizer, norms
from coserve.train.optimizer_offload import MakeOffload


class MasterWeights:
    """Weights, gradients and moments of one adapter, in float32 (float64 on a float64 base).

    Inference and training graphs use a copy in the base's dtype, published as one immutable version:
    `current`. `in_graph` is the same with graph leaves as its parameters, on the same storage; `leaves` are
    these by stage. `room` are slabs for the weights of the next version, empty without `make_room`.
    """

    def __init__(
        self,
        base: Base,
        loaded: LoadedAdapters,
        start: AdapterVersion,
        moments: Mapping[str, Tensor] | None = None,
        make_offload: MakeOffload | None = None,
    ) -> None:
        """Publishes `start`. `moments` are the initial ones, in the form of `Optimizer.moments`."""
        self._base, self._loaded = base, loaded
        start = _in_order(start, base)
        self.optimizer = Optimizer(start.parameters(), exact_type(base.dtype), base.device, make_offload)
        self.current = start.in_type(base.dtype)
        self._shares, self._in_stages = base.shards.shares(start), base.shards.in_stages(start)
        served = self.current.parameters()
        self._served_exact = [name for name, tensor in served.items() if tensor.dtype != base.dtype]
        if moments is not None:
            self.optimizer.restore(moments)
        self.room: list[Tensor] = []
        self.make_room()
        if self.room:  # a stage of a pipeline may have nothing of an adapter
            torch._foreach_copy_(self.room, self.optimizer.flat)
        self.publish(start.version)

    def make_room(self) -> None:
        """Allocates the memory of an update, so that an update of many sessions cannot run out of memory."""
        self.optimizer.bring()
        self.room = self.optimizer.slabs.empty(self._base.dtype, self._base.device)

    def publish(self, version: int) -> None:
        """Makes the weights in `room` the current version, numbered `version`."""
        served = self.optimizer.slabs.views(self.room)
        served |= {name: self.optimizer.weights[name].detach().clone() for name in self._served_exact}
        self.room = []
        self.current = replace(self.current.with_parameters(served), version=version)
        self._loaded.add(self._base.shards.published(self.current))
        self._take_leaves(served)

    def accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        """Adds to the gradient of the weight whose copy is `leaf` of `in_graph`."""
        self.optimizer.accumulate(self._names[id(leaf)], gradient)

    def complete_gradients(self) -> None:
        """Adds, over ranks and over stages, the gradients of tensors of which each has all, and has seen a
        part."""
        shards, weights = self._base.shards, self.optimizer.weights.items()
        summed = {name for name, share in self._shares.items() if share.is_sum}
        for ranks, names in ((shards.ranks, summed), (shards.stages, self._in_stages)):
            sums = [w.grad for name, w in weights if name in names and w.grad is not None]
            if ranks.count > 1 and sums:
                flat = ranks.sum(torch.cat([grad.flatten() for grad in sums]))
                for grad, found in zip(sums, torch.split(flat, [grad.numel() for grad in sums]), strict=True):
                    grad.copy_(found.view(grad.shape))

    def gradient_norm(self) -> float:
        """The Euclidean norm of all ranks' gradients taken together."""
        weights = self.optimizer.weights.items()
        elsewhere = self._in_stages if self._base.shards.stages.number else ()  # the first stage counts them
        own = [(name, w.grad) for name, w in weights if w.grad is not None and name not in elsewhere]
        found = [(self._shares[name].is_everywhere, grad) for name, grad in own]
        parts, whole = ([grad for is_whole, grad in found if is_whole is kind] for kind in (False, True))
        of_parts, of_whole = norms([parts, whole])
        return self._base.shards.norm(of_parts, of_whole)

    @cached_property
    def lowest(self) -> int:
        """The lowest stage of the base where something trains, on any rank; the base's depth without any."""
        sites = self._base.sites
        return min(
            (sites[place.path].stage for place, _ in self.current.whole.placed()), default=self._base.depth
        )

    def losses(self, found: Sequence[float]) -> Sequence[float]:
        """Losses of the jobs of this base, given those that this rank has found."""
        return self._base.shards.losses(found)

    @property
    def ranks(self) -> Ranks:
        """The ranks that have the weights."""
        return self._base.shards.every

    def _take_leaves(self, published: Mapping[str, Tensor]) -> None:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in published.items()}
        self.in_graph = self.current.with_parameters(leaves)
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self.leaves = stage_leaves(self.in_graph, self._base.sites)


def stage_leaves(adapter: AdapterVersion, sites: Mapping[str, Site]) -> dict[int, tuple[Tensor, ...]]:
    """The parameters of an adapter by stage."""
    found: dict[int, tuple[Tensor, ...]] = {}
    for place, bypass in adapter.placed():
        stage = sites[place.path].stage
        # A leaf that bypasses share is there once in each of their stages, where it has one gradient.
        known = {id(leaf): leaf for leaf in found.get(stage, ())}
        known |= {id(leaf): leaf for leaf in bypass.parameters().values()}
        found[stage] = tuple(known.values())
    return found


def _in_order(adapter: AdapterVersion, base: Base) -> AdapterVersion:
    """Sorts an adapter's bypasses into the model's order, on which the last bits of a gradient's norm
    depend."""
    order = {path: number for number, path in enumerate(base.sites)}
    parts = (
        replace(part, bypasses=dict(sorted(part.bypasses.items(), key=lambda item: order[item[0].path])))
        for part in adapter.parts
    )
    return replace(adapter, parts=tuple(parts))
