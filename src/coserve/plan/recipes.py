"""Adapter methods that plans compare, and their syntax on a command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedConfig

from coserve.adapters.settings import settings_of
from coserve.errors import ConfigError
from coserve.model.probe import has_states

Fields = Mapping[str, Any]

# As a request would ask for them. DoRA is LoRA with another option, and counts as a method here. These are
# compared where none is named,
METHODS: Final[Mapping[str, Fields]] = {
    "lora": {"type": "lora", "rank": 8},
    "dora": {"type": "lora", "rank": 8, "use_dora": True},
    "ia3": {"type": "ia3"},
    "bottleneck": {"type": "bottleneck"},
    "bitfit": {"type": "bitfit"},
    "ln_tuning": {"type": "ln_tuning"},
    "prefix_tuning": {"type": "prefix_tuning", "num_virtual_tokens": 16},
    "prompt_tuning": {"type": "prompt_tuning", "num_virtual_tokens": 16},
    "p_tuning": {"type": "p_tuning", "num_virtual_tokens": 16},
}
# and those by name alone.
NAMED: Final[Mapping[str, Fields]] = {
    "lokr": {"type": "lokr", "rank": 8},
    "loha": {"type": "loha", "rank": 8},
    "vera": {"type": "vera", "rank": 256},
    "oft": {"type": "oft", "block_size": 32},
    "trainable_tokens": {"type": "trainable_tokens", "tokens": [0, 1]},
    "miss": {"type": "miss", "rank": 64},
    "randlora": {"type": "randlora", "rank": 32},
    "hra": {"type": "hra", "rank": 8},
    "shira": {"type": "shira", "rank": 8},
    "fourierft": {"type": "fourierft"},
    "vblora": {"type": "vblora", "vector_length": 64},
    "c3a": {"type": "c3a", "block_size": 64},
    "road": {"type": "road"},
}


def methods_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """Names of the methods that go with a model: virtual tokens do not with recurrent layers."""
    own = METHODS.items()
    return tuple(name for name, fields in own if not ("num_virtual_tokens" in fields and has_states(config)))


def read_recipe(text: str) -> tuple[str, Sequence[Fields]]:
    """The name and the parts of "METHOD", of "METHOD:key=value,key=value", where a value is JSON if it can be
    and names are joined by +, or of JSON as a request has it. Raises ConfigError or AdapterError."""
    if text.lstrip().startswith(("{", "[")):
        return text, _checked(_json(text))
    name, _, options = text.partition(":")
    known = {**METHODS, **NAMED}
    if name not in known:
        raise ConfigError(f"there is no adapter method {name!r}; there are {', '.join(known)}")
    fields = {**known[name]}
    for pair in filter(None, options.split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{text!r}: expected METHOD:KEY=VALUE,KEY=VALUE and not {pair!r}")
        fields = {k: v for k, v in fields.items() if _ALIASES.get(k, k) != _ALIASES.get(key, key)}
        fields[key] = _value(value)
    return text, _checked([fields])


_ALIASES: Final = {"num_virtual_tokens": "tokens", "use_dora": "dora", "r": "rank"}  # of what METHODS sets


def _checked(parts: Sequence[Fields]) -> Sequence[Fields]:
    settings_of(parts)
    return parts


def _json(text: str) -> Sequence[Fields]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the adapter is no JSON: {error}") from error
    parts = found if isinstance(found, list) else [found]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError("an adapter in JSON is an object of fields, or a list of such")
    return parts


def _value(text: str) -> Any:
    if "+" in text and not text.startswith("+"):
        return text.split("+")
    try:
        return json.loads(text)
    except ValueError:
        return text
