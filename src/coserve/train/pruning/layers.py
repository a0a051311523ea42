"""Choices for all layers of a model with an adapter, each kind of layer traced once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, Place, SequentialBypass, Side
from coserve.adapters.experts import ExpertsLoRA
from coserve.adapters.sites import EMBEDDED, Kind, Sites
from coserve.train.pruning.choice import Choice
from coserve.train.pruning.once import Once
from coserve.train.pruning.sketch import Sketch
from coserve.train.pruning.trace import trace

_SKETCHES: Final = 8  # models cached
_CHOICES: Final = 512  # kinds of layers with an adapter


@dataclass(frozen=True, slots=True)
class Modelled:
    """A model by its class and configuration."""

    kind: type[PreTrainedModel] | None  # None: what transformers has for the configuration
    text: str  # the configuration as JSON
    config: PreTrainedConfig = field(compare=False)

    @staticmethod
    def of(kind: type[PreTrainedModel] | None, config: PreTrainedConfig) -> "Modelled":
        own = type(config).from_dict(copy.deepcopy(config.to_dict()))  # without how its modules are chosen
        return Modelled(kind, own.to_json_string(use_diff=False), own)


def _sketch(model: Modelled) -> Sketch | RuntimeError:
    try:
        return Sketch(model.kind, model.config)
    except Exception as error:  # of any kind: it is transformers' own code that is run
        return RuntimeError(f"{type(error).__name__}: {error}")


SKETCHES: Final = Once(_sketch, _SKETCHES)


def sketch_of(model: Modelled) -> Sketch:
    """Raises RuntimeError where torch cannot run it without its weights."""
    found = SKETCHES(model)
    if isinstance(found, RuntimeError):
        raise found.with_traceback(None)
    return found


@dataclass(frozen=True, slots=True)
class BackwardNeeds:
    """Requirements of backward on the layers that an adapter trains: `lowest` is the stage where it ends (the
    number of layers where only what follows them trains), `enters` whether somebody asks for the gradient of
    what the first layer is given, `asks_past` whether keys and values before a sequence's own train."""

    lowest: int
    enters: bool
    asks_past: bool

    @staticmethod
    def of(adapter: AdapterVersion, sites: Sites, depth: int) -> "BackwardNeeds":
        stages = [sites[place.path].stage for place, _ in adapter.placed()]
        beside = [place for place, _ in adapter.placed() if place.side in (Side.INPUT, Side.OUTPUT)]
        early = any(sites[place.path].stage == EMBEDDED for place in beside)
        virtual = adapter.virtual
        return BackwardNeeds(
            min(stages, default=depth), early or virtual.prompt_count > 0, virtual.given_count > 0
        )

    @property
    def first(self) -> int:
        """The lowest layer that is gone back through."""
        return max(self.lowest, 0)

    def asks_input(self, layer: int) -> bool:
        return layer > self.lowest and (layer > 0 or self.enters)


@dataclass(frozen=True, slots=True)
class LayerKey:
    """One layer with an adapter's bypasses in it; equal ones have equal answers. Paths are those within the
    layer; `signs` tell bypasses apart by where they stand, what they are and what they have: ranks and
    widths change nothing in what is kept of the base's."""

    model: Modelled
    dtype: torch.dtype
    form: tuple[object, ...]
    signs: tuple[object, ...]
    asks_input: bool
    asks_past: bool
    keepable: frozenset[str]


def _choice(key: LayerKey, layer: int, placed: Sequence[tuple[Place, Bypass]]) -> Choice | None:
    """The choice of `layer` with what is `placed` in it. None where torch cannot trace the layer, as its
    control flow depends on numbers."""
    if any(isinstance(bypass, ExpertsLoRA) for _, bypass in placed):
        return None
    try:
        sketch = sketch_of(key.model)
        graph = trace(sketch, layer, placed, key.asks_input, key.asks_past)
    except Exception:
        return None
    return Choice(graph.in_type(key.dtype), key.keepable)


choice_of: Final = Once(_choice, _CHOICES)


def choices(
    model: Modelled, adapter: AdapterVersion, sites: Sites, dtype: torch.dtype
) -> dict[int, Choice | None]:
    """Choices for each layer that a job goes back through, from the lowest, on a base in `dtype`. `sites` are
    those where all rows pass."""
    try:
        sketch = sketch_of(model)
    except RuntimeError:
        return {}
    needs = BackwardNeeds.of(adapter, sites, sketch.depth)
    found = {}
    for layer in range(needs.first, sketch.depth):
        prefix = f"{list(sketch.layers)[layer]}."
        placed = [(place, bypass) for place, bypass in adapter.placed() if place.path.startswith(prefix)]
        linears = (p for p, s in sites.items() if s.kind is Kind.LINEAR and p.startswith(prefix))
        key = LayerKey(
            model,
            dtype,
            sketch.form(layer),
            tuple((p.path.removeprefix(prefix), p.side, *_sign(bypass)) for p, bypass in placed),
            needs.asks_input(layer),
            needs.asks_past,
            frozenset(path.removeprefix(prefix) for path in linears),
        )
        found[layer] = choice_of(key, layer, placed)
    return found


def _sign(bypass: Bypass) -> tuple[object, ...]:
    if isinstance(bypass, SequentialBypass):
        return tuple(_sign(link) for link in bypass.links)
    return (type(bypass), *bypass.parameters())
