"""The architecture of a model: which component each tensor in its files belongs to (BlockLLM, 4.3).

Nothing is loaded: the model is built without weights, and names in files are compared with its modules'.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coserve.adapters.saved import PREFIX
from coserve.adapters.sites import Kind, decoder_layers, sublayers
from coserve.adapters.text_part import is_multimodal
from coserve.errors import CoserveError, UnsupportedModel, ZooError
from coserve.zoo.manifest import MOST_LAYERS, Component, ComponentKind

CONFIG: Final = "config.json"
_REFUSED: Final = "{} has no configuration of a causal language model"
_MOST_NUMBER: Final = (1 << 63) - 1  # in a configuration
_LAYERS: Final = re.compile(r"layers$|\bn_layer$")  # fields that count layers, or have places of some
_MOST_MODULES: Final = 1 << 17  # of a model; one with 256 experts in each of 61 layers has 63,000
# Modules behind the layers that some models register in front of them (OPT).
_BEHIND: Final = re.compile(r"final|project_out|lm_head|head")
_BEFORE_EMBEDDED: Final = ("PROMPT_TUNING", "P_TUNING")
_BEFORE_ATTENTION: Final = ("PREFIX_TUNING",)


@dataclass(frozen=True, slots=True)
class _LayerModules:
    """A layer's modules that belong to its attention, by the first part of their names; the others belong to
    its feed-forward."""

    tail: str  # of its path, as "layers.7"
    attention: frozenset[str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The components of a model: the embedding, attention and feed-forward of each layer, and the head, at
    the places 0 to 2 · layers + 1. `config` is transformers'."""

    config: Any
    width: int
    vocabulary: int
    _layers: tuple[_LayerModules, ...]
    _in_front: frozenset[str]

    @staticmethod
    def of(name: str, configuration: bytes) -> "Architecture":
        """The architecture of a model, which errors call `name`, of its `config.json`. Raises ZooError and
        UnsupportedModel."""
        check_config(name, configuration)
        with (
            bounded(name),
            TemporaryDirectory(prefix="coserve-zoo-") as folder,
            torch.device("meta"),
        ):
            (Path(folder) / CONFIG).write_bytes(configuration)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if is_multimodal(config) and config.get_text_config() is not config:
                raise UnsupportedModel(
                    f"{name} is a {config.model_type}, which is multimodal: a zoo stores models of text alone"
                )
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            return Architecture.of_model(model)

    @staticmethod
    def of_model(model: PreTrainedModel) -> "Architecture":
        """The architecture of a model, whose tensors need no data. Raises UnsupportedModel."""
        layers = decoder_layers(model)
        found = tuple(_layer(path, layer) for path, layer in layers.items())
        text = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        if embedding is None or not found:
            raise UnsupportedModel(f"{model.config.model_type} has no embedding of tokens and no layers")
        return Architecture(
            model.config,
            int(text.hidden_size),
            int(text.vocab_size),
            found,
            frozenset(_in_front(model, next(iter(layers)))),
        )

    @property
    def places(self) -> int:
        """Number of components."""
        return 2 * len(self._layers) + 2

    def kind(self, place: int) -> ComponentKind:
        """Kind of the component at a place."""
        if place == 0:
            return ComponentKind.EMBEDDING
        if place == self.places - 1:
            return ComponentKind.HEAD
        return ComponentKind.ATTENTION if place % 2 else ComponentKind.FEED_FORWARD

    def place(self, tensor: str) -> tuple[int, str]:
        """The place of a tensor in a model's or adapter's file, and its name within the component."""
        dotted = f".{tensor}."
        for number, layer in enumerate(self._layers):
            at = dotted.find(f".{layer.tail}.")
            if at >= 0:
                inside = dotted[at + len(layer.tail) + 2 : -1]
                is_attention = inside.split(".")[0] in layer.attention
                return 1 + 2 * number + (not is_attention), inside
        module = dotted[1:-1].rpartition(".")[0]
        ending = next((one for one in self._in_front if f".{module}.".find(f".{one}.") >= 0), None)
        return (self.places - 1 if ending is None else 0), tensor

    def chain(self, tensors: Mapping[str, str]) -> tuple[Component, ...]:
        """The components of a model whose files have these tensors, ids by name."""
        return self._chain((*self.place(name), key) for name, key in tensors.items())

    def bypasses(self, tensors: Mapping[str, str], fields: Mapping[str, Any]) -> tuple[Component, ...]:
        """The bypasses of an adapter with these tensors and this configuration, in the places of the
        components beside which they are. A prefix is beside every attention."""
        return self._chain(
            (place, inside, key)
            for name, key in tensors.items()
            for place, inside in self._places_of_bypass(name, fields)
        )

    def _places_of_bypass(self, name: str, fields: Mapping[str, Any]) -> list[tuple[int, str]]:
        number, colon, own = name.partition(":")
        parts = fields.get("parts")
        if colon and number.isdecimal() and isinstance(parts, list) and int(number) < len(parts):
            inside = self._places_of_bypass(own, parts[int(number)])
            return [(place, f"{number}:{name}") for place, name in inside]
        kind = str(fields.get("peft_type"))
        if not name.startswith(PREFIX) and kind in _BEFORE_ATTENTION:
            return [(place, name) for place in range(1, self.places - 1, 2)]
        if not name.startswith(PREFIX) and kind in _BEFORE_EMBEDDED:
            return [(0, name)]
        return [self.place(name.removeprefix(PREFIX))]

    def _chain(self, tensors: Iterable[tuple[int, str, str]]) -> tuple[Component, ...]:
        found: list[dict[str, str]] = [{} for _ in range(self.places)]
        for place, inside, key in tensors:
            found[place][inside] = key
        return tuple(Component(self.kind(place), own) for place, own in enumerate(found))


def check_config(name: str, data: bytes) -> bytes:
    """A configuration as it is. Raises ZooError for one whose numbers no model has: transformers counts up to
    them, even where it makes no tensor."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ZooError(f"{_REFUSED.format(name)}: {error}") from error
    if not isinstance(fields, dict):
        raise ZooError(f"{_REFUSED.format(name)}: {CONFIG} holds no object")
    waiting: list[tuple[str, Any]] = [("", fields)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((field, inner) for inner in value)
        elif isinstance(value, int):
            most = MOST_LAYERS if _LAYERS.search(field) else _MOST_NUMBER
            if not -_MOST_NUMBER <= value <= most:
                raise ZooError(
                    f"{_REFUSED.format(name)}: {field[:80]!r} is {value!s:.20}, and {most} is the most"
                )
    return data


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Context in which a model is made of a configuration, without tensors. Raises ZooError where that fails
    or makes more modules than any model has."""
    made, thread = 0, get_ident()

    def count(*_: object) -> None:
        nonlocal made
        made += get_ident() == thread
        if made > _MOST_MODULES:
            raise ZooError(f"{_REFUSED.format(name)}: it would have more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    except CoserveError:
        raise
    except Exception as error:  # whatever transformers and torch raise for numbers that do not fit together
        told = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ZooError(f"{_REFUSED.format(name)}: {told}") from error
    finally:
        hook.remove()


def _layer(path: str, layer: nn.Module) -> _LayerModules:
    """A layer's attention, and the norms around it: of the layer's own norms, in the order of its modules,
    the first half, rounded up."""
    heavy = {name for name, module in layer.named_children() if any(p.ndim > 1 for p in module.parameters())}
    norms = [name for name, module in layer.named_children() if name not in heavy and _has_parameters(module)]
    attention = sublayers(layer).get(Kind.ATTENTION)
    if attention is None:
        raise UnsupportedModel(f"the layer {path} has no attention")
    return _LayerModules(
        ".".join(path.split(".")[-2:]), frozenset({attention, *norms[: (len(norms) + 1) // 2]})
    )


def _in_front(model: PreTrainedModel, first_layer: str) -> Iterable[str]:
    """Endings of the paths of modules with parameters that run before the layers."""
    stack = first_layer.rpartition(".")[0]
    for path, module in model.named_modules():
        if path == stack:
            return
        if _has_parameters(module, recurse=False) and not _BEHIND.search(path):
            yield path.rpartition(".")[2]


def _has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse=recurse), None) is not None
