"""Assigns bits to the weights of a model.

Linears of the decoder layers get the requested bits. Embedding and head always get eight: four would save
less than a tenth of a small model, and their error is in every logit. Norms, biases, routers and fused
experts (three-dimensional weights) are not quantized.
"""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.adapters.sites import Kind, Site
from coserve.errors import ConfigError
from coserve.model.batch import BatchCell
from coserve.model.origin import Origin
from coserve.model.placement import Placement
from coserve.model.placing import Holds, leave_file, place_linears, put
from coserve.model.quantized.embedding import QuantizedEmbedding, is_lookup
from coserve.model.quantized.int8 import Int8Placement
from coserve.model.quantized.nf4 import BLOCK, place_in_nf4
from coserve.parallel.ranks import ALONE, Ranks
from coserve.parallel.search import Cut

# Fewer outputs than any projection has: routers and gates, a thousandth of the bytes, which decide the most.
_FEWEST_OUTPUTS: Final = 32

_log = logging.getLogger(__name__)


def quantize_model(
    model: PreTrainedModel,
    layers: Iterable[str],
    origin: Origin,
    cell: BatchCell,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> None:
    """Replaces the model's weights by quantized ones on the origin's device, one at a time, so that at most
    one exists twice. `layers` are the paths of the decoder layers. Of linears in `cuts` the model has what
    one of `ranks` has, and gets what that has of the quantized weights; all ranks call this together.

    Raises ConfigError where the library for four bits is missing, or a block of four bits would be cut.
    """
    inside = tuple(f"{path}." for path in layers)
    quantize_ends(model, inside, origin, cell)
    quantize_layers(model, origin, cell, lambda path: path.startswith(inside), cuts, ranks)
    leave_file(model)
    say_what_stays(model, inside)


def quantize_layers(
    model: PreTrainedModel,
    origin: Origin,
    cell: BatchCell,
    holds: Holds,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> None:
    """Quantizes linears of decoder layers, at paths that `holds` accepts: see `quantize_model`."""

    def choose(path: str, weight: Tensor, bias: Tensor | None) -> Placement | None:
        cut = cuts.get(path, Cut.WHOLE)
        outputs = len(weight) * (ranks.count if cut is Cut.COLWISE else 1)
        inputs = weight.shape[1] * (ranks.count if cut is Cut.ROWWISE else 1)
        if outputs < _FEWEST_OUTPUTS:
            return None
        weight, bias = weight.to(origin.device), None if bias is None else bias.to(origin.device)
        if origin.quantized == "4bit" and inputs % BLOCK == 0:
            if weight.shape[1] % BLOCK:
                raise ConfigError(
                    f"engine.quantize 4bit: {ranks.count} ranks would cut the blocks of {BLOCK} weights of "
                    f"{path}, which has {inputs} inputs: choose 8bit, or another engine.tensor_parallel"
                )
            return place_in_nf4(weight, bias)
        return Int8Placement(weight, bias, ranks if cut is Cut.ROWWISE else ALONE)

    place_linears(model, cell, choose, holds)


def quantize_ends(model: PreTrainedModel, inside: tuple[str, ...], origin: Origin, cell: BatchCell) -> None:
    """Quantizes the embedding, the head and other linears that are not `inside` of decoder layers."""
    head = _path_of(model, model.get_output_embeddings())
    tied = _is_tied(model)
    site = next(site for site in origin.sites.values() if site.kind is Kind.EMBEDDING)
    embedding = _embedding(model, site, origin.device)

    def choose(path: str, weight: Tensor, bias: Tensor | None) -> Placement | None:
        if path == head and tied:
            return None if embedding is None else embedding.placement
        if len(weight) < _FEWEST_OUTPUTS:
            return None
        bias = None if bias is None else bias.to(origin.device)
        return Int8Placement(weight.to(origin.device), bias)

    place_linears(model, cell, choose, lambda path: not path.startswith(inside))
    if embedding is not None:
        put(model, site.path, embedding)


def _embedding(model: PreTrainedModel, site: Site, device: torch.device) -> QuantizedEmbedding | None:
    """A quantized embedding; None where the model's own does more than look rows up (then a tied head stays,
    too)."""
    own = model.get_input_embeddings()
    if not is_lookup(own, site.factor):
        return None
    bias = model.get_output_embeddings().bias if _is_tied(model) else None  # the placement is the head's too
    bias = None if bias is None else bias.data.to(device)
    return QuantizedEmbedding(Int8Placement(own.weight.data.to(device), bias), site.factor)


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _path_of(model: PreTrainedModel, module: nn.Module | None) -> str | None:
    return next((path for path, found in model.named_modules() if found is module), None)


def say_what_stays(model: PreTrainedModel, inside: tuple[str, ...]) -> None:
    """Logs the weights of layers that keep their type."""
    modules = (module for path, module in model.named_modules() if f"{path}.".startswith(inside))
    own = (p for m in modules if not isinstance(m, nn.Conv1d) for p in m.parameters(recurse=False))
    stays = sum(p.nbytes for p in own if p.ndim > 2)
    if stays:
        _log.warning("fused experts are not quantized: %.1f GB of weights stay as they are", stays / 1e9)
