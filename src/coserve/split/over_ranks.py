"""A base executor's linears over several ranks, each of which has a part of every weight (Symbiosis, 3.2).

All ranks compute every call together, and each has the whole of what calls bring and give, so clients see one
executor. In the placement `cut` a rank computes what its part of the weights gives, and parts of the outputs
are put together. In `gathered`, as in FSDP, a rank computes some rows, and gathers each weight before it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.errors import RequestError
from coserve.model.contents import Contents, ModelContents
from coserve.model.placement import Placement, PlainPlacement, place_locally
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.load import cut_parameters, unwrap
from coserve.model.sharded.placement import ColumnShard, GatheredWeight, RowShard, WholeColumns, WholeRows
from coserve.model.sharded.plan import planned_modules
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut
from coserve.split.executor import BaseLinears
from coserve.split.layers import LayerChoice
from coserve.split.linears import find_linears, shape_of
from coserve.split.messages import Limits, LinearCall
from coserve.split.privacy.field import exponents_of

PLACEMENTS: Final = ("cut", "gathered")
_NONE: Final = -(1 << 20)  # less than any exponent
Tell = Callable[[LinearCall, Sequence[Tensor]], AbstractContextManager[None]]  # tells other ranks of a call


class LinearsOverRanks:
    """Which part of each linear a rank has, and how calls use it."""

    def __init__(self, ranks: Ranks, gathers: bool, device: torch.device) -> None:
        self.ranks, self.gathers, self._device = ranks, gathers, device
        self._cuts: dict[str, Cut] = {}
        self._paired = frozenset[str]()

    def cut(self, model: PreTrainedModel) -> None:
        """Has the parameters of a model on the meta device say how they are cut."""
        cut_parameters(model, self.shards(model), self.ranks.count, self._device)

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
        """How content hashes of whole tensors are found; all ranks call this together."""
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


class RankedLinears(BaseLinears):
    """One rank's part of a model's linears. Calls come to the first rank, which tells the others."""

    def __init__(
        self,
        model: PreTrainedModel,
        over: LinearsOverRanks,
        limits: Limits | None,
        choice: LayerChoice,
        device: torch.device,
        contents: ModelContents,
        tell: Tell | None = None,
    ) -> None:
        """Takes over a model whose parts are loaded. `tell` is the first rank's."""
        self.over, self._tell, self._lock = over, tell, threading.Lock()
        super().__init__(model, limits, choice, device=device, contents=contents, over=over)
        if over.gathers:  # rows of a sequence are not computed apart
            spans = {path: own for path, own in self._spans.items() if own.shape.cuts != "layer"}
            self._spans = spans
            self.hello = msgspec.structs.replace(self.hello, spans=tuple(own.shape for own in spans.values()))

    def compute(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `BaseLinears`; for the first rank. One call is computed at a time."""
        if call.dtype == "field":
            raise RequestError("exact products of the field are not computed over ranks (--tensor-parallel)")
        assert self._tell is not None, "calls come to the first rank"
        given = [tensor.to(self.device) for tensor in tensors]
        with self._lock, self._tell(call, given):
            return self.share(call, [self.over.ranks.of(0, tensor) for tensor in given])

    def share(self, call: LinearCall, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes a call, of which all ranks have all rows, together with them."""
        if not self.over.gathers:
            return super().compute(call, tensors)
        ranks = self.over.ranks
        each = -(-call.rows // ranks.count)
        rows = [_padded(tensor, each * ranks.count)[ranks.number * each :][:each] for tensor in tensors]
        found = super().compute(msgspec.structs.replace(call, rows=each), rows)
        return [ranks.whole(tensor, 0)[: call.rows] for tensor in found]


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
