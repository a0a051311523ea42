"""Shapes of models by name, or from the configuration in a model's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from coserve.errors import ConfigError
from coserve.workload.shapes import ModelShape, shape_named, shape_names

_FIELDS: Final = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
_MOST: Final = {  # far beyond any model; a step counts its layers one by one
    "hidden_size": 1 << 20,
    "num_hidden_layers": 4096,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}
_TYPES: Final = ("bfloat16", "float16", "float32")


def model_shape(name: str) -> ModelShape:
    """The shape called `name`, or that of a folder with a `config.json` (or such a file). Raises ConfigError,
    with the field at fault, for anything else and for models that are no plain decoder of one kind of
    layer."""
    if name in shape_names():
        return shape_named(name)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"there is no model {name!r}: expected a folder with a config.json, or one of the shapes "
            f"{', '.join(shape_names())}"
        )
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: expected a model's configuration: {error}") from error
    return _shape(str(file), path.name or name, fields)


def _shape(place: str, name: str, fields: Mapping[str, Any]) -> ModelShape:
    for experts in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.get(experts):
            raise ConfigError(f"{place}: {experts}: layers with experts cannot be simulated")
    found = {ours: _number(place, theirs, fields.get(theirs)) for ours, theirs in _FIELDS.items()}
    groups = fields.get("num_key_value_heads")
    groups = found["heads"] if groups is None else _number(place, "num_key_value_heads", groups)
    if found["heads"] % groups:
        raise ConfigError(f"{place}: num_key_value_heads: {found['heads']} heads cannot share {groups}")
    width = fields.get("head_dim")
    width = None if width is None else _number(place, "head_dim", width)
    if (width or found["hidden"] / found["heads"]) * found["heads"] != found["hidden"]:
        raise ConfigError(f"{place}: head_dim: {width} times {found['heads']} heads is not {found['hidden']}")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if dtype not in _TYPES:
        raise ConfigError(f"{place}: dtype: expected one of {', '.join(_TYPES)}, not {dtype!r}")
    return ModelShape(name, groups=groups, dtype=dtype, family="llama", **found)


def _number(place: str, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST[name]:
        raise ConfigError(
            f"{place}: {name}: expected a whole number from 1 to {_MOST[name]:,}, not {value!r:.40}"
        )
    return value
