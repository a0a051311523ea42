"""Loads a rank's part of a base: of every tensor that is cut, the rank's own bytes alone are read.

transformers' own loader reads the files, as it renames and merges their tensors: it is given parameters that
say how they are cut (`DTensor`), and reads slices of the files for them. What has been read is made plain
tensors again, and the linears frozen ones (`placement.py`). Nothing of transformers' own parallel execution
runs.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Placement as ShardOfTensor
from transformers import PreTrainedModel

from coserve.adapters.sharded import AdapterShards
from coserve.model.base import Base
from coserve.model.batch import BatchCell
from coserve.model.contents import ModelContents
from coserve.model.linear import FrozenLinear
from coserve.model.load import adopt, drive, load_model, make_base, usable_device
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.placement import place_locally
from coserve.model.placing import leave_file, put, weights_of
from coserve.model.quantized.quantize import quantize_model
from coserve.model.refusal import refusing
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.modules import cut_embedding, cut_experts
from coserve.model.sharded.placement import ColumnShard, GatheredColumnShard, RowShard
from coserve.model.sharded.plan import ShardPlan
from coserve.model.sharded.whole import WholeFrame
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut


def load_sharded(
    model: str | Path,
    ranks: Ranks,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
) -> Base:
    """Loads a rank's part of a base from a local folder or hub name with files of safetensors. All ranks call
    this together. `quantize` is as in `load_base`: a rank quantizes its own part, to the numbers that one
    rank would have. Raises the errors of `load_base`, and UnsupportedModel for a model that cannot be cut
    over so many ranks."""
    where, contents = usable_device(device), ModelContents(model)
    shaping = _Shaping(ranks, where, quantize)
    with refusing(repr(str(model)), "cannot be loaded"):
        loaded = load_model(model, dtype, shaping.cut)
    with refusing(loaded.config.model_type, "cannot be cut over ranks"):
        return shaping.completed(drive(shaping.base_of(loaded, contents)))


class _Shaping:
    """The cut of one model."""

    def __init__(self, ranks: Ranks, where: torch.device, quantize: str) -> None:
        self._ranks, self._where, self._cell, self._quantize = ranks, where, BatchCell(), quantize
        self._plan: ShardPlan

    def cut(self, model: PreTrainedModel) -> None:
        """Has parameters on the meta device say how they are cut."""
        self._plan = ShardPlan.of(model, self._ranks.count)
        cut_parameters(model, self._plan.tensors, self._ranks.count, self._where)

    def base_of(self, model: PreTrainedModel, contents: ModelContents) -> Base:
        """The base of a model whose parts are loaded."""
        layers, plan = adopt(model), self._plan
        digests = contents_over_ranks(model.state_dict(), contents, self._ranks)
        fingerprint = fingerprint_of(model.config, digests, linear_paths(model), self._quantize)
        origin = Origin.of(model, layers, self._quantize, self._where, fingerprint)
        unwrap(model)
        for path, cut in plan.linears.items():
            if cut is Cut.ROWWISE and self._ranks.number:
                model.get_submodule(path).bias = None  # the first rank adds it
        if self._quantize != "none":
            quantize_model(model, layers, origin, self._cell, plan.linears, self._ranks)
        leave_file(model)
        if any(tensor.device != self._where for tensor in model.state_dict().values()):
            model = model.to(device=self._where)
        for path, cut in plan.linears.items():
            self._place(model, path, cut)
        for path, name in plan.widths:  # by which an attention splits what its first linear gives
            owner = model.get_submodule(path)
            setattr(owner, name, getattr(owner, name) // self._ranks.count)
        for path in plan.experts:
            cut_experts(model.get_submodule(path), self._ranks)
        if plan.embedding:
            cut_embedding(model.get_submodule(plan.embedding), self._ranks)
        base = make_base(model, layers, origin, self._cell)
        base.shards = AdapterShards(plan.linears, self._ranks, plan.pieces, plan.headwise)
        return base

    def completed(self, base: Base) -> Base:
        """A base that is driven, with the whole one for adapters' methods."""
        base.whole = WholeFrame(base, self._plan, self._ranks)
        return base

    def _place(self, model: PreTrainedModel, path: str, cut: Cut) -> None:
        linear = model.get_submodule(path)
        kind = RowShard if cut is Cut.ROWWISE else ColumnShard
        if path in self._plan.gathered:
            kind = GatheredColumnShard
        if isinstance(linear, FrozenLinear):  # it is quantized
            linear.placement = kind(linear.placement, self._ranks)
            return
        weight, bias = weights_of(linear)
        own = place_locally(weight, bias)
        shape = weight.shape[0], weight.shape[1]
        put(model, path, FrozenLinear(path, kind(own, self._ranks), shape, self._cell))


def cut_parameters(
    model: nn.Module, tensors: Mapping[str, ShardOfTensor], ranks: int, where: torch.device
) -> None:
    """Has parameters on the meta device, by name, say how they are cut over `ranks`, so that transformers
    reads a rank's part of them. `unwrap` makes them plain ones again."""
    mesh = DeviceMesh(where.type, torch.arange(ranks), mesh_dim_names=("tp",))
    made: dict[int, nn.Parameter] = {}
    for name, placement in tensors.items():
        owner, key = _owner(model, name)
        own = owner._parameters[key]
        assert own is not None
        if id(own) not in made:  # tied ones stay one
            whole = distribute_tensor(own.data, mesh, [placement], src_data_rank=None)
            made[id(own)] = nn.Parameter(whole, requires_grad=False)
        owner._parameters[key] = made[id(own)]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def unwrap(model: nn.Module) -> None:
    """Makes parameters of what ranks have of them, tied ones one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, own in module._parameters.items():
            if own is not None and isinstance(own.data, DTensor):
                if id(own) not in made:
                    made[id(own)] = nn.Parameter(own.data.to_local(), requires_grad=False)
                module._parameters[key] = made[id(own)]
