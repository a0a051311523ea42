"""Loads a stage's part of a base: of the model's files the tensors of its own layers alone are read.

The first stage has the embeddings too, the last one the head, and all have what is small beside these, as the
final norm. Layers that are elsewhere give what they are given while the base is proved: each stage proves its
own layers, and the whole is their product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.bypass import Dense
from coserve.adapters.sites import FrozenParameters, Modules, Weights, decoder_layers
from coserve.adapters.staged import StageShards
from coserve.core.sequence import stage_spans
from coserve.errors import CoserveError, NotOffered, UnsupportedModel
from coserve.model.base import Base
from coserve.model.batch import BatchCell
from coserve.model.contents import ModelContents
from coserve.model.frozen import HeldParameters
from coserve.model.load import adopt, drive, load_model, make_base, usable_device
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.placing import leave_file, put
from coserve.model.refusal import refusing
from coserve.model.staged.absent import AbsentEmbedding, AbsentHead, AbsentLayer
from coserve.model.staged.chain import StageChain
from coserve.parallel.ranks import Ranks


def load_staged(
    model: str | Path,
    ranks: Ranks,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    prove: Callable[[Base], None] = lambda _: None,
) -> Base:
    """Loads the part that one of `ranks` has of a base, as a stage of a pipeline, from a local folder or hub
    name with files of safetensors. All stages call this together. `prove` is a proof beside the usual one.
    Raises the errors of `load_base`, and UnsupportedModel for a model that cannot be cut into so many
    stages."""
    where, contents = usable_device(device), ModelContents(model)
    stage = StageCut(ranks)
    with refusing(repr(str(model)), "cannot be loaded"):
        loaded = load_model(model, dtype, stage.take_out)
    with refusing(loaded.config.model_type, "cannot be cut into stages"):
        return _LoadedStage(stage, ranks, where).base_of(loaded, contents, prove)


class SpanCut:
    """The cut of one model: the layers of a span, and the embeddings and the head where these are asked
    for."""

    def __init__(self, has_embedding: bool, has_head: bool) -> None:
        self._has_embedding, self._has_head = has_embedding, has_head
        self.modules: Modules  # of the whole
        self.span = range(0)  # of the layers that stay
        self.parameters = 0  # of the whole

    def choose(self, depth: int) -> range:
        """The layers that stay, of a model with so many. Raises UnsupportedModel."""
        raise NotImplementedError

    def take_out(self, model: PreTrainedModel) -> None:
        """Takes out the rest of a model, whose parameters may be on the meta device. Raises
        UnsupportedModel."""
        layers = decoder_layers(model)
        self.span = self.choose(len(layers))
        modules = Modules.of(model)
        is_tied = f"{modules.head}.weight" in model.all_tied_weights_keys  # which transformers does later
        self.modules, self.parameters = replace(modules, tied=is_tied), model.num_parameters()
        if is_tied and not modules.tied:
            self.parameters -= model.get_input_embeddings().weight.numel()
        for index, (path, layer) in enumerate(layers.items()):
            if index not in self.span:
                put(model, path, AbsentLayer(layer))
        inside = tuple(f"{path}." for path in layers)
        for path, module in list(model.named_modules()):
            is_head = path == modules.head
            if is_head and not self._has_head:
                put(model, path, AbsentHead(module))
            # Whoever has the head reads the embedding where that is the head.
            elif (
                not self._has_embedding
                and type(module) is nn.Embedding
                and not path.startswith(inside)
                and not (self._has_head and is_tied and module is model.get_input_embeddings())
            ):
                put(model, path, AbsentEmbedding(module))
        if not self._has_head:
            model.all_tied_weights_keys = {}  # of the two the embedding alone is here


class StageCut(SpanCut):
    """The cut of one of several stages: the first has the embeddings, the last one the head."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(not ranks.number, ranks.number == ranks.count - 1)
        self._number, self._count = ranks.number, ranks.count

    def choose(self, depth: int) -> range:
        """See `SpanCut`."""
        if depth < self._count:
            raise UnsupportedModel(f"its {depth} layers cannot be cut into {self._count} stages")
        own = stage_spans(depth, self._count)[self._number]
        return range(own.first, own.last)


class _LoadedStage:
    """One stage's model, which is loaded."""

    def __init__(self, cut: StageCut, ranks: Ranks, where: torch.device) -> None:
        self._cut, self._ranks, self._where, self._cell = cut, ranks, where, BatchCell()

    def base_of(self, model: PreTrainedModel, contents: ModelContents, prove: Callable[[Base], None]) -> Base:
        """The base of a model whose part is loaded."""
        layers = adopt(model)
        found = contents.of(model.state_dict())
        facts = self._ranks.each((found, linear_paths(model)))
        digests = {name: content for own, _ in facts for name, content in own.items()}
        linears = {path: None for _, own in facts for path in own}
        fingerprint = fingerprint_of(model.config, digests, list(linears), "none")
        origin = Origin.of(model, layers, "none", self._where, fingerprint)
        leave_file(model)
        if any(tensor.device != self._where for tensor in model.state_dict().values()):
            model = model.to(device=self._where)
        base, fault = self._proved(make_base(model, layers, origin, self._cell), prove)
        told = self._ranks.each((list(base.sites.items()), fault))
        if fault := next((own for _, own in told if own), ""):
            raise UnsupportedModel(fault)
        order = {path: place for place, path in enumerate(self._cut.modules.paths)}
        sites = {path: site for own, _ in told for path, site in own}
        base.sites = dict(sorted(sites.items(), key=lambda item: order[item[0]]))
        base.modules, base.parameters = self._cut.modules, self._cut.parameters
        base.shards = StageShards(self._ranks, base.sites, self._cut.span, base.depth)
        base.frozen = StageParameters(model, base, self._ranks)
        base.chain = StageChain(base.chain, self._cell, self._cut.span, self._ranks)
        return base

    def _proved(self, base: Base, prove: Callable[[Base], None]) -> tuple[Base, str]:
        """The base, driven, and why it cannot be one, which all stages are told."""
        try:
            drive(base)
            if base.mixers:
                raise UnsupportedModel("the states of its recurrent layers are not cut into stages")
            if base.hands_on or any(block.returns for block in base.chain):
                raise UnsupportedModel("its layers hand on more than a hidden state, which no stage sends")
            prove(base)
        except UnsupportedModel as error:
            return base, str(error)
        return base, ""


@dataclass(frozen=True, slots=True)
class _Fault:
    """A parameter that cannot be read where it is."""

    error: CoserveError


class StageParameters(FrozenParameters):
    """Parameters of all stages: the one that has a module reads it for all. All stages ask for the same ones
    in the same order."""

    def __init__(self, model: PreTrainedModel, base: Base, ranks: Ranks) -> None:
        self._held = HeldParameters(model, base.chain, base.device)
        self._base, self._ranks = base, ranks

    def weights(self, path: str) -> Weights:
        raise NotOffered(
            f"{path}: methods that compute with the base's weights (DoRA) are not offered with "
            "engine.pipeline_parallel"
        )

    def bias(self, path: str) -> Tensor | None:
        found: Tensor | None = self._everywhere(path, self._held.bias)
        return found

    def dense(self, path: str) -> Dense:
        found: Dense = self._everywhere(path, self._held.dense)
        return found

    def gain(self, path: str) -> Tensor:
        found: Tensor = self._everywhere(path, self._held.gain)
        return found

    def embedded(self, tokens: Tensor) -> Tensor:
        raise NotOffered("a prompt of words: not offered with engine.pipeline_parallel")

    def _everywhere(self, path: str, read: Callable[[str], Any]) -> Any:
        """The value that the stage reads which has the module at `path`, for all stages."""
        value: Any = None
        if self._base.shards.has(path):
            try:
                value = read(path)
            except CoserveError as error:
                value = _Fault(error)
        value = next((own for own in self._ranks.each(value) if own is not None), None)
        if isinstance(value, _Fault):
            raise value.error
        return value
