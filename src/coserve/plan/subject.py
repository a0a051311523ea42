"""Models of plans: configuration and number type, without the weights."""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError as HubError
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from coserve.adapters.text_part import made_of
from coserve.errors import ConfigError, ModelNotFound, UnsupportedModel
from coserve.model.dequantized.forms import as_dense, is_readable, quantized_fields
from coserve.model.foreign import saved_type
from coserve.model.load import load_model

_WANTED: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by its configuration. `folder` holds its weights; None where they are drawn at random."""

    name: str
    config: Any
    dtype: torch.dtype
    folder: Path | None = None

    def build(self) -> PreTrainedModel:
        """A model of this configuration, its weights drawn from a fixed seed. Raises UnsupportedModel."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            own = deepcopy(self.config)  # a model writes into its configuration
            try:
                model = made_of(own, dtype=self.dtype)
            except ValueError as error:
                raise UnsupportedModel(f"{self.name} is no decoder-only language model") from error
        return model.eval()

    def without_weights(self) -> "Subject":
        """The same model with random weights: nothing is read from its folder."""
        return replace(self, folder=None)

    def load(self) -> PreTrainedModel:
        """The model in the folder, or one with random weights where there is none."""
        if self.folder is None:
            return self.build()
        return load_model(self.folder, self.dtype).eval()


def subject_of(name: str, config: Any, dtype: str = "auto", folder: Path | None = None) -> Subject:
    """A subject with this configuration. `dtype` is a floating-point type, or "auto": that of the
    configuration, else of the weights.

    Raises ConfigError for anything else.
    """
    if dtype == "auto":
        own = getattr(config, "dtype", None)
        found = own if isinstance(own, torch.dtype) else saved_type(folder)
        return Subject(name, config, found or torch.float32, folder)
    if dtype not in _WANTED:
        raise ConfigError(f"--dtype must be auto, {', '.join(sorted(_WANTED))}, not {dtype!r}")
    return Subject(name, config, getattr(torch, dtype), folder)


def read_subject(path: Path, dtype: str = "auto") -> Subject:
    """A model's folder, or a file with its configuration as transformers writes it. Nothing but JSON and the
    headers of safetensors files is read. Raises ModelNotFound or ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} holds no configuration of a model: {error}") from error
    return subject_from_fields(path.resolve().name, fields, dtype, path if path.is_dir() else None)


def subject_from_fields(name: str, fields: Any, dtype: str = "auto", folder: Path | None = None) -> Subject:
    """A subject from the fields of a configuration's JSON. Raises ModelNotFound or ConfigError."""
    try:
        if not isinstance(fields, dict) or fields.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise ValueError("it names no model_type that transformers knows")
        config = AutoConfig.for_model(**fields)
        if (saved := quantized_fields(fields)) is not None and is_readable(saved):
            config = as_dense(config)
    except (ValueError, TypeError, KeyError, HubError) as error:
        reason = str(error).partition(". ")[0]
        raise ModelNotFound(f"{name} is no configuration of a transformers model: {reason}") from error
    return subject_of(name, config, dtype, folder)
