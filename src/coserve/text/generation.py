"""Sampling that a model's makers recommend: its generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coserve.core.request import SamplingParams
from coserve.errors import ConfigError

OURS: Final = SamplingParams(temperature=1.0)  # of a request that says nothing, as OpenAI's API has it
_FIELDS: Final[Mapping[str, type]] = {  # those that vLLM reads, too, but for max_new_tokens
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


def recommended(model: str | Path) -> SamplingParams:
    """The sampling of requests that say nothing: of a model in a folder or on the hub, `OURS` where its file
    says nothing or is not there. Raises ConfigError for a value that is none."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(str(model), "generation_config.json", _raise_exceptions_for_missing_entries=False)
        given = {} if path is None else json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the generation_config.json of {model} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"the generation_config.json of {model} is no object")
    found = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} in the generation_config.json of {model} is no number: {value!r:.80}")
    try:
        typed = {name: _FIELDS[name](value) for name, value in found.items()}
        return SamplingParams(**{"temperature": OURS.temperature, **typed})
    except (ConfigError, ValueError, OverflowError) as error:
        raise ConfigError(f"the generation_config.json of {model}: {error}") from error
