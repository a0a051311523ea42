"""The cut of a base executor's linears over ranks: what a rank keeps of each, and what computes with it."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.model.contents import Contents, ModelContents
from coserve.model.placement import Placement, PlainPlacement, place_locally
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.load import cut_parameters, unwrap
from coserve.model.sharded.placement import ColumnShard, GatheredWeight, RowShard, WholeColumns, WholeRows
from coserve.model.sharded.plan import planned_modules
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut
from coserve.split.linears import find_linears, shape_of
from coserve.split.privacy.field import exponents_of

PLACEMENTS: Final = ("cut", "gathered")
_NONE: Final = -(1 << 20)  # less than any exponent


class LinearsOverRanks:
    """The part of each linear that a rank has, and its use in calls."""

    def __init__(self, ranks: Ranks, gathers: bool, device: torch.device) -> None:
        self.ranks, self.gathers, self._device = ranks, gathers, device
        self._cuts: dict[str, Cut] = {}
        self._paired = frozenset[str]()

    def cut(self, model: PreTrainedModel) -> None:
        """Has the parameters of a model on the meta device say how they are cut."""
        cut_parameters(model, self.shards(model), self.ranks.mesh(self._device.type))

    def shards(self, model: PreTrainedModel) -> dict[str, Shard]:
        """Decides how a model's parameters are cut: linears by their outputs where ranks divide these, else
        by their inputs, else not at all. The last linear of a feed-forward layer is cut by its inputs, which
        ranks have from those before it."""
        linears = {path: linear for path, (_, linear) in find_linears(model).items()}
        if not self.gathers:
            self._paired = paired_linears(model, self.ranks.count)
        styles = dict(planned_modules(model)) if self._paired else {}
        shards: dict[str, Shard] = {}
        for path, linear in linears.items():
            cut = self._cut_of(*shape_of(linear))
            if path in self._paired and styles[path] == "rowwise":
                cut = Cut.ROWWISE
            self._cuts[path] = cut
            if cut is not Cut.WHOLE:
                dim = 0 if cut is Cut.COLWISE else 1
                shards[f"{path}.weight"] = Shard(1 - dim if isinstance(linear, Conv1D) else dim)
            if cut is Cut.COLWISE and linear.bias is not None:
                shards[f"{path}.bias"] = Shard(0)
        for name, source in model.all_tied_weights_keys.items():  # the head's weight is the embedding's
            if name in shards:
                shards[source] = shards[name]
        return shards

    def contents(self, contents: ModelContents) -> Callable[[Mapping[str, Tensor]], Contents]:
        """Gives what hashes whole tensors; all ranks call that together."""
        return lambda tensors: contents_over_ranks(tensors, contents, self.ranks)

    def exponents(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """As `exponents_of` whole weights; all ranks call this together."""
        parts: dict[str, Any] = {path: weight.data for path, weight in weights.items()}
        parts = {path: own.to_local() if isinstance(own, DTensor) else own for path, own in parts.items()}
        own = exponents_of(parts)  # of the largest weight that a rank has; the least is that of all
        exponents = torch.tensor([own.get(path, _NONE) for path in weights], device=self._device)
        least = self.ranks.whole(exponents[None], 0).amin(0).tolist()
        return {path: found for path, found in zip(weights, least, strict=True) if found != _NONE}

    def unwrap(self, model: PreTrainedModel) -> None:
        """Leaves of each parameter what the rank has."""
        unwrap(model)

    def placed(self, path: str, weight: Tensor, bias: Tensor | None) -> tuple[Placement, Placement]:
        """The placement of a linear for calls, and the one inside the model's own modules, given what the
        rank has of the weight [out, in] and the bias."""
        cut, ranks = self._cuts[path], self.ranks
        if cut is Cut.WHOLE:
            whole = place_locally(weight, bias, float32=False)
            return whole, whole
        if self.gathers:
            gathered = GatheredWeight(PlainPlacement(weight, bias), ranks, 0 if cut is Cut.COLWISE else 1)
            return gathered, gathered
        if cut is Cut.ROWWISE and ranks.number:
            bias = None  # the first rank adds it
        own = place_locally(weight, bias, float32=False)
        called = (WholeColumns if cut is Cut.COLWISE else WholeRows)(own, ranks)
        if path not in self._paired:
            return called, called
        return called, (ColumnShard if cut is Cut.COLWISE else RowShard)(own, ranks)

    def _cut_of(self, outputs: int, inputs: int) -> Cut:
        if outputs % self.ranks.count == 0:
            return Cut.COLWISE
        return Cut.ROWWISE if inputs % self.ranks.count == 0 else Cut.WHOLE


def paired_linears(model: PreTrainedModel, ranks: int) -> frozenset[str]:
    """Paths of linears of feed-forward layers, of which transformers' plan cuts the last one by inputs: what
    ranks have of the others' outputs is what they need of its inputs."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for path, style in planned_modules(model):
        groups.setdefault(path.rpartition(".")[0], []).append((path, style))
    found = set[str]()
    for parent, group in groups.items():
        shapes = {path: _shape_at(model, path) for path, _ in group}
        is_whole = all(
            shape is not None and shape[1 if style == "rowwise" else 0] % ranks == 0
            for (_, style), shape in zip(group, shapes.values(), strict=True)
        )
        styles = [style for _, style in group]
        attends = hasattr(model.get_submodule(parent), "layer_idx")
        if is_whole and not attends and {*styles} == {"colwise", "rowwise"} and styles.count("rowwise") == 1:
            found |= shapes.keys()
    return frozenset(found)


def _shape_at(model: PreTrainedModel, path: str) -> tuple[int, int] | None:
    module = model.get_submodule(path)
    return shape_of(module) if type(module) in (torch.nn.Linear, Conv1D) else None
