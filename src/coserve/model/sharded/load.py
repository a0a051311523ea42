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
from coserve.model.placing import Holds, leave_file, put, weights_of
from coserve.model.quantized.quantize import quantize_model
from coserve.model.refusal import refusing
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.mixers import MixerCut
from coserve.model.sharded.modules import cut_embedding, cut_experts, share_last, split_input
from coserve.model.sharded.placement import ColumnShard, GatheredColumnShard, RowShard
from coserve.model.sharded.plan import ShardPlan
from coserve.model.sharded.vocabulary import cut_logits
from coserve.model.sharded.whole import WholeFrame
from coserve.parallel.ranks import Ranks, part_of
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
    shards = RankCut(ranks, where)
    with refusing(repr(str(model)), "cannot be loaded"):
        loaded = load_model(model, dtype, shards.cut)
    with refusing(loaded.config.model_type, "cannot be cut over ranks"):
        layers = adopt(loaded)
        digests = contents_over_ranks(loaded.state_dict(), contents, ranks)
        fingerprint = fingerprint_of(loaded.config, digests, linear_paths(loaded), quantize)
        origin = Origin.of(loaded, layers, quantize, where, fingerprint)
        base = drive(shards.base_of(loaded, layers, origin))
        base.whole, base.logits = WholeFrame(base, shards.plan, ranks), cut_logits(base, ranks)
        return base


class RankCut:
    """The cut of one model over `ranks`; of one rank alone there is nothing to cut."""

    def __init__(self, ranks: Ranks, where: torch.device) -> None:
        self._ranks, self._where, self.cell = ranks, where, BatchCell()
        self.plan = ShardPlan.of_one()

    def cut(self, model: PreTrainedModel) -> None:
        """Has parameters on the meta device say how they are cut. Raises UnsupportedModel."""
        if self._ranks.count > 1:
            self.plan = ShardPlan.of(model, self._ranks.count)
            cut_parameters(model, self.plan.tensors, self._ranks.mesh(self._where.type))

    def base_of(self, model: PreTrainedModel, layers: Mapping[str, nn.Module], origin: Origin) -> Base:
        """The base of a model whose parts are loaded, with its decoder layers by path."""
        self.take(model)
        if origin.quantized != "none":
            quantize_model(model, layers, origin, self.cell, self.plan.linears, self._ranks)
        leave_file(model)
        if any(tensor.device != self._where for tensor in model.state_dict().values()):
            model = model.to(device=self._where)
        self.place(model)
        base = make_base(model, layers, origin, self.cell)
        base.shards = self.adapters
        return base

    @property
    def adapters(self) -> AdapterShards:
        """Cuts adapters as the model is cut."""
        plan = self.plan
        return AdapterShards(plan.linears, self._ranks, plan.pieces, plan.headwise, plan.cuts_heads)

    def take(self, model: PreTrainedModel, holds: Holds = lambda _: True) -> None:
        """Leaves of parameters that are loaded, of modules whose paths `holds` accepts, what the rank has."""
        unwrap(model, holds)
        for path, mixer in self.plan.mixers.items():
            if holds(path):
                self._cut_mixer(model, path, mixer)
        for path, cut in self.plan.linears.items():
            if cut is Cut.ROWWISE and self._ranks.number and holds(path):
                model.get_submodule(path).bias = None  # the first rank adds it

    def place(self, model: PreTrainedModel, holds: Holds = lambda _: True) -> None:
        """Has such modules, once they have what the rank has, give what whole ones give."""
        plan = self.plan
        for path, cut in plan.linears.items():
            if holds(path):
                self._place(model, path, cut)
        for path, name in plan.widths:  # by which an attention splits what its first linear gives
            if holds(path):
                owner = model.get_submodule(path)
                setattr(owner, name, getattr(owner, name) // self._ranks.count)
        for path in filter(holds, plan.split):
            split_input(model.get_submodule(path), self._ranks)
        for path, width in plan.shared.items():
            if holds(path):
                self._place(model, path, Cut.WHOLE)
                share_last(model.get_submodule(path), width, self._ranks)
        for path in filter(holds, plan.experts):
            cut_experts(model.get_submodule(path), self._ranks)
        if plan.embedding and holds(plan.embedding):
            cut_embedding(model.get_submodule(plan.embedding), self._ranks)

    def _place(self, model: PreTrainedModel, path: str, cut: Cut) -> None:
        linear = model.get_submodule(path)
        kind = RowShard if cut is Cut.ROWWISE else ColumnShard
        if path in self.plan.gathered:
            kind = GatheredColumnShard
        if not isinstance(linear, FrozenLinear):  # else it is quantized
            weight, bias = weights_of(linear)
            shape = weight.shape[0], weight.shape[1]
            linear = FrozenLinear(path, place_locally(weight, bias), shape, self.cell)
            put(model, path, linear)
        owner, _, name = path.rpartition(".")
        if (mixer := self.plan.mixers.get(owner)) is not None and name in mixer.columns:
            linear.placement = mixer.place(name, linear.placement, self._ranks)
        elif cut is not Cut.WHOLE:
            linear.placement = kind(linear.placement, self._ranks)

    def _cut_mixer(self, model: PreTrainedModel, path: str, mixer: MixerCut) -> None:
        """Leaves of a recurrent mixer what the rank has. Of linears whose pieces are cut each for itself
        ranks have read rows as they lie in the files, and exchange them, one linear at a time."""
        module = model.get_submodule(path)
        mixer.cut(module, self._ranks)
        mixer.join_norm(model.config.model_type, path, module, self._ranks)
        for name, pieces in mixer.columns.items():
            for own in module.get_submodule(name).parameters() if len(pieces) > 1 else ():
                own.data = part_of(self._ranks.along(own.data, 0), 0, self._ranks, pieces)


def cut_parameters(model: nn.Module, tensors: Mapping[str, ShardOfTensor], mesh: DeviceMesh) -> None:
    """Has parameters on the meta device, by name, say how they are cut over the ranks of a mesh, so that
    transformers reads a rank's part of them. `unwrap` makes them plain ones again."""
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


def unwrap(model: nn.Module, holds: Holds = lambda _: True) -> None:
    """Makes parameters, of modules whose paths `holds` accepts, of what ranks have of them, tied ones one."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, own in module._parameters.items() if holds(path) else ():
            if own is not None and isinstance(own.data, DTensor):
                if id(own) not in made:
                    made[id(own)] = nn.Parameter(own.data.to_local(), requires_grad=False)
                module._parameters[key] = made[id(own)]
