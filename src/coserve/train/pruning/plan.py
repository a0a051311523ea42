"""Derives `Fates` (which activations a job keeps) from its adapter, model configuration and save policy."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from transformers import PreTrainedConfig

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import exact_type
from coserve.adapters.lowrank import is_plain
from coserve.errors import UnsupportedModel
from coserve.model.base import Base
from coserve.train.pruning.choice import ATTENTION, Choice
from coserve.train.pruning.layers import BackwardNeeds, Modelled, choices, sketch_of
from coserve.train.pruning.table import Explained, explain
from coserve.train.save_policy import Fate, Fates, SavePolicy, SavePolicySetting

Choices = Mapping[int, Choice]

# Bytes of a base from which on inputs alone are worth a trace: it takes most of a second, and finds which
# products are unused, a fifth of backward.
_LARGE: Final = 1 << 24


def fates_of(base: Base, adapter: AdapterVersion, keep: SavePolicySetting, rows: int) -> Fates:
    """Fates for micro-batches of at most `rows` rows. A layer that cannot be traced keeps its input alone,
    and so do all of a small base where no more is asked for."""
    model = Modelled.of(type(base.model), base.model.config)
    found = choices(model, adapter, base.sites, base.dtype) if _is_worth_it(base, keep) else {}
    traced = {layer: choice for layer, choice in found.items() if choice is not None}
    kept = kept_activations(traced, keep, _room(base, keep, rows), _calls_of(base))
    products: dict[str, Fate] = {path: Fate.COMPUTED for path in base.linears if path not in base.sites}
    attention: dict[int, Fate] = {}
    nbytes = 0.0
    for layer, choice in traced.items():
        own = choice.everything() if keep is SavePolicy.EVERYTHING else choice.fates(kept[layer])
        nbytes += choice.nbytes(own)
        attention[layer] = own.pop(ATTENTION)
        products.update({f"{base.chain.blocks[layer].path}.{path}": fate for path, fate in own.items()})
    products |= {
        path: Fate.SUM
        for path, bypass in adapter.bypasses.outputs.items()
        if products.get(path) is Fate.KEPT and is_plain(bypass)
    }
    lowest = BackwardNeeds.of(adapter, base.sites, base.depth).first
    for layer in range(lowest):
        prefix = f"{base.chain.blocks[layer].path}."
        attention[layer] = Fate.UNUSED
        products.update({path: Fate.UNUSED for path in base.linears if path.startswith(prefix)})
    return Fates(products, attention, lowest=lowest, nbytes=nbytes)


def foresee(base: Base, adapter: AdapterVersion, keep: SavePolicySetting) -> None:
    """Traces what a job that trains this adapter will ask about, which takes most of a second once: steps can
    go on meanwhile, and find the answer there. Shapes are enough."""
    if _is_worth_it(base, keep):
        model = Modelled.of(type(base.model), base.model.config)
        choices(model, adapter, base.sites, base.dtype)


def _is_worth_it(base: Base, keep: SavePolicySetting) -> bool:
    """Tells whether layers are traced. Those of a model have other shapes than the parts that a rank has."""
    return not base.shards.cuts and (
        keep is not SavePolicy.INPUTS or base.nbytes >= _LARGE or base.makes_calls
    )


def _calls_of(base: Base) -> dict[int, frozenset[str]]:
    """Linears of each layer that are computed elsewhere, by their paths in it."""
    found = {}
    for layer, block in enumerate(base.chain):
        paths = (path for path, linear in base.linears.items() if linear.placement.is_elsewhere)
        found[layer] = frozenset(path.removeprefix(f"{block.path}.") for path in paths if block.holds(path))
    return found


def kept_activations(
    layers: Choices,
    keep: SavePolicySetting,
    room: float,
    calls: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> dict[int, frozenset[str]]:
    """Names of the activations of each layer to keep. Where `keep` is a budget: those of all layers that save
    most per byte, up to `room` bytes a row. `calls` are linears of layers that are computed elsewhere: all of
    their products that a gradient depends on are kept, and come first in a budget."""
    if isinstance(keep, SavePolicy):
        asked = {
            layer: frozenset(own.name for own in choice.savable if own.name in calls.get(layer, ()))
            for layer, choice in layers.items()
        }
        if keep is SavePolicy.PRUNED:
            return {layer: choice.worthwhile() | asked[layer] for layer, choice in layers.items()}
        return asked
    kept: dict[int, set[str]] = {layer: set() for layer in layers}
    offers = [(activation, layer) for layer, choice in layers.items() for activation in choice.savable]
    # Of equals the lower layer's.
    for activation, layer in sorted(
        offers, key=lambda o: (o[0].name not in calls.get(o[1], ()), -o[0].worth)
    ):
        if activation.nbytes <= room:
            room -= activation.nbytes
            kept[layer].add(activation.name)
    return {layer: frozenset(names) for layer, names in kept.items()}


def input_bytes(base: Base) -> int:
    """Bytes that a row's layer inputs, keys and values take, and what keys and values are owed."""
    width, exact = base.dtype.itemsize, exact_type(base.dtype).itemsize
    cached = sum(cache.width for cache in base.caches)
    return base.depth * base.streams * base.hidden_size * width + cached * (width + exact)


def _room(base: Base, keep: SavePolicySetting, rows: int) -> float:
    """Bytes a row that activations may take."""
    return 0.0 if isinstance(keep, SavePolicy) else keep / rows - input_bytes(base)


def explain_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    methods: Sequence[object],
    keep: SavePolicy = SavePolicy.PRUNED,
) -> list[Explained]:
    """Explains what is kept of a model that is not loaded for a fresh adapter of these methods (their
    settings), layer by layer. Raises UnsupportedModel where it cannot be traced."""
    model = Modelled.of(None, config)
    try:
        sketch = sketch_of(model)
        found = choices(model, sketch.fresh(methods), sketch.sites, dtype)
    except RuntimeError as error:
        raise UnsupportedModel(f"{config.model_type} cannot be run without its weights: {error}") from error
    traced = {layer: choice for layer, choice in found.items() if choice is not None}
    if not traced:
        raise UnsupportedModel(f"what layers of {config.model_type} do depends on their numbers: no trace")
    kept = kept_activations(traced, keep, 0.0)
    return explain(list(traced.items()), [kept[layer] for layer in traced])
