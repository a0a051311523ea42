"""Loads a stage's part of a base: of the model's files the tensors of its own layers alone are read.

The first stage has the embeddings too, the last one the head, and all have what is small beside these, as the
final norm. Layers that are elsewhere give what they are given while the base is proved: each stage proves its
own layers, and the whole is their product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.bypass import Dense
from coserve.adapters.sharded import AdapterShards
from coserve.adapters.sites import CutWeights, FrozenParameters, Modules, Weights, decoder_layers
from coserve.adapters.staged import StageShards
from coserve.attention.backend import CacheShape
from coserve.core.sequence import stage_spans
from coserve.errors import CoserveError, UnsupportedModel
from coserve.model.base import Base
from coserve.model.contents import ModelContents
from coserve.model.load import adopt, drive, load_model, usable_device
from coserve.model.origin import Origin, fingerprint_of, linear_paths
from coserve.model.placing import put
from coserve.model.refusal import refusing, unsupported
from coserve.model.sharded.contents import contents_over_ranks
from coserve.model.sharded.load import RankCut
from coserve.model.sharded.plan import ShardPlan
from coserve.model.sharded.vocabulary import cut_logits
from coserve.model.sharded.whole import WholeFrame
from coserve.model.staged.absent import AbsentEmbedding, AbsentHead, AbsentLayer
from coserve.model.staged.chain import StageChain
from coserve.parallel.ranks import RankGrid, Ranks


def load_staged(
    model: str | Path,
    grid: RankGrid,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
    prove: Callable[[Base], None] = lambda _: None,
) -> Base:
    """Loads the part that one rank of `grid` has of a base, in a stage of a pipeline, from a local folder or
    hub name with files of safetensors. All ranks call this together. `quantize` is as in `load_base`, and
    `prove` a proof beside the usual one. Raises the errors of `load_base`, and UnsupportedModel for a model
    that cannot be cut so."""
    where, contents = usable_device(device), ModelContents(model)
    stage, shards = StageCut(grid.stages), RankCut(grid.inside, where)

    def cut(model: PreTrainedModel) -> None:
        stage.take_out(model)
        shards.cut(model)

    with refusing(repr(str(model)), "cannot be loaded"):
        loaded = load_model(model, dtype, cut)
    with refusing(loaded.config.model_type, "cannot be cut into stages"):
        return _LoadedStage(stage, shards, grid, where).base_of(loaded, contents, quantize, prove)


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
        layers, text = decoder_layers(model), model.config.get_text_config()
        self.span = self.choose(len(layers))
        if reading := getattr(text, "num_kv_shared_layers", 0):
            told = f"its last {reading} layers read keys and values of earlier ones, which no stage sends"
            raise unsupported(model.config.model_type, told, "serve it without engine.pipeline_parallel")
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
    """One rank's part of a stage's model, which is loaded."""

    def __init__(self, cut: StageCut, shards: RankCut, grid: RankGrid, where: torch.device) -> None:
        self._cut, self._shards, self._grid, self._where = cut, shards, grid, where

    def base_of(
        self, model: PreTrainedModel, contents: ModelContents, quantize: str, prove: Callable[[Base], None]
    ) -> Base:
        """The base of a model whose part is loaded."""
        layers, grid = adopt(model), self._grid
        found = contents_over_ranks(model.state_dict(), contents, grid.inside)
        facts = grid.stages.each((found, linear_paths(model)))
        digests = {name: content for own, _ in facts for name, content in own.items()}
        linears = {path: None for _, own in facts for path in own}
        fingerprint = fingerprint_of(model.config, digests, list(linears), quantize)
        origin = Origin.of(model, layers, quantize, self._where, fingerprint)
        base, fault = self._proved(self._shards.base_of(model, layers, origin), prove)
        span = self._cut.span
        caches = (
            [] if fault else WholeFrame(base, self._shards.plan, grid.inside).caches[span.start : span.stop]
        )
        told = grid.every.each((list(base.sites.items()), caches, fault))
        if fault := next((own for *_, own in told if own), ""):
            raise UnsupportedModel(fault)
        order = {path: place for place, path in enumerate(self._cut.modules.paths)}
        sites = {path: site for own, *_ in told for path, site in own}
        base.sites = dict(sorted(sites.items(), key=lambda item: order[item[0]]))
        base.modules, base.parameters = self._cut.modules, self._cut.parameters
        base.shards = StageShards(grid, base.shards, base.sites, span, base.depth)
        base.logits = cut_logits(base, grid.inside)
        every = [cache for _, own, _ in told[:: grid.inside.count] for cache in own]
        base.whole = StagedFrame(base, self._shards.plan, grid, every)
        base.chain = StageChain(base.chain, self._shards.cell, span, grid.stages)
        return base

    def _proved(self, base: Base, prove: Callable[[Base], None]) -> tuple[Base, str]:
        """The base, driven, and why it cannot be one, which all stages are told."""
        try:
            drive(base)
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


class StagedFrame(WholeFrame):
    """The `Frame` of a whole base, of whose stages `base` is one, or a rank's part of it. `caches` are those
    of all layers."""

    def __init__(self, base: Base, plan: ShardPlan, grid: RankGrid, caches: Sequence[CacheShape]) -> None:
        super().__init__(base, plan, grid.inside)
        self._caches = caches
        self.frozen = StageParameters(self.frozen, base.shards, grid.stages)

    @property
    def caches(self) -> Sequence[CacheShape]:
        """Keys and values of each layer, of all heads."""
        return self._caches


class _ElsewhereWeights:
    """Stands for the weights of a linear that is in another stage."""

    bias = None

    def row_norms(self) -> Tensor:
        raise AssertionError("its stage computes them, for all")

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("its stage computes them")


class StageParameters(FrozenParameters):
    """Parameters of all stages: the one that has a module reads it, by its `own`, for all. All stages ask for
    the same ones in the same order."""

    def __init__(self, own: FrozenParameters, shards: AdapterShards, ranks: Ranks) -> None:
        self._held, self._shards, self._ranks = own, shards, ranks

    def weights(self, path: str) -> Weights:
        own = self._held.weights(path) if self._shards.has(path) else _ElsewhereWeights()

        def norms() -> Tensor:
            found: Tensor = self._everywhere(path, lambda _: own.row_norms())
            return found

        def product(x: Tensor) -> Tensor:
            found: Tensor = self._everywhere(path, lambda _: own.forward(x))
            return found

        return CutWeights(own, norms, lambda: self.bias(path), product)

    def bias(self, path: str) -> Tensor | None:
        found: Tensor | None = self._everywhere(path, self._held.bias)
        return found

    def dense(self, path: str) -> Dense:
        found: Dense = self._everywhere(path, self._held.dense)
        return found

    def gain(self, path: str) -> Tensor:
        found: Tensor = self._everywhere(path, self._held.gain)
        return found

    def rounded(self, path: str, weight: Tensor) -> Tensor:
        found: Tensor = self._everywhere(path, lambda _: self._held.rounded(path, weight))
        return found

    def embedded(self, tokens: Tensor) -> Tensor:
        own = None if self._ranks.number else self._held.embedded(tokens)
        found: Tensor = self._ranks.each(own)[0]
        return found

    def _everywhere(self, path: str, read: Callable[[str], Any]) -> Any:
        """The value that the stage reads which has the module at `path`, for all stages."""
        value: Any = None
        if self._shards.has(path):
            try:
                value = read(path)
            except CoserveError as error:
                value = _Fault(error)
        value = next((own for own in self._ranks.each(value) if own is not None), None)
        if isinstance(value, _Fault):
            raise value.error
        return value
