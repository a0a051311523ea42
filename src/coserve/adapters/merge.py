"""Merges an adapter into its base's weights, for tools that cannot load adapters."""

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from coserve.adapters.activation import expect_always_active
from coserve.adapters.bypass import Dense, Side, exact_type
from coserve.adapters.files import read_adapter
from coserve.adapters.sites import (
    FrozenParameters,
    Modules,
    Site,
    Sites,
    decoder_layers,
    find_sites,
    gain_of,
    is_experts,
    layer_width,
)
from coserve.adapters.text_part import auto_class, keep_text, put_back
from coserve.attention.backend import CacheShape
from coserve.errors import AdapterError, ModelNotFound

# What else a folder holds that the model is of no use without.
_COPIED: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "chat_template*", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def merge_adapter(model_folder: str | Path, adapter_folder: str | Path, out: str | Path) -> Path:
    """Writes the model in `model_folder` with the adapter in `adapter_folder` merged into `out`.

    Sums are in float32 (float64 for float64 weights); weights keep the type in which the model was saved.
    Returns `out`. Raises ModelNotFound, AdapterMismatch, or AdapterError, also where the adapter's method
    cannot be merged or `out` is not empty.
    """
    model_folder, out = Path(model_folder), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AdapterError(f"{out} exists already and is not empty: nothing is merged over it")
    model = merged_model(model_folder, adapter_folder)
    model.save_pretrained(out)
    for file in out.glob("*.safetensors"):  # the library lets nobody else read what it writes
        file.chmod((out / "config.json").stat().st_mode & 0o777)
    for pattern in _COPIED:
        for file in model_folder.glob(pattern):
            shutil.copyfile(file, out / file.name)
    return out


def merged_model(model_folder: Path, adapter_folder: str | Path) -> PreTrainedModel:
    """The model in `model_folder` with the adapter in `adapter_folder` in its weights, in memory. Raises what
    `merge_adapter` does."""
    model = load_whole(model_folder)
    beside_text = keep_text(model)
    whole = WholeModel(model)
    adapter = read_adapter(adapter_folder, "merged", whole, torch.float64, torch.device("cpu"))
    expect_always_active(adapter, "no weights do so: it cannot be merged")
    merged: dict[str, Dense] = {}
    # What stands at an input comes before all that stands at the output, and so is multiplied in last.
    for place, bypass in sorted(adapter.placed(), key=lambda placed: placed[0].side is Side.INPUT):
        before = merged[place.path] if place.path in merged else whole.frozen.dense(place.path)
        merged[place.path] = bypass.merged(before, place.side)
    for path, dense in merged.items():
        whole.frozen.replace(path, dense)
    put_back(model, beside_text)
    return model


class WholeModel:
    """An unmodified model as the `Frame` of an adapter to be merged into it."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        self.sites = find_sites(model, layers)
        self.modules = Modules.of(model)
        self.depth = len(layers)
        self.hidden_size = layer_width(model)
        self.frozen = OwnParameters(model, self.sites)
        self.mixers: Sequence[object] = ()  # what they hold is no matter for weights

    @cached_property
    def caches(self) -> Sequence[CacheShape]:
        raise AdapterError("keys and values before a sequence's own cannot be written into a model's weights")


class OwnParameters(FrozenParameters):
    """Parameters of a model with its own modules, which can be replaced."""

    def __init__(self, model: PreTrainedModel, sites: Sites) -> None:
        self._model, self._sites = model, sites

    @torch.no_grad()
    def embedded(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._model.get_input_embeddings()(tokens)
        return found

    def rows(self, path: str, tokens: Tensor) -> Tensor:
        weight = self._module(path).weight
        assert isinstance(weight, Tensor)
        return weight.detach()[tokens.to(weight.device)]

    def experts(self, path: str) -> nn.Module:
        module = self._module(path)
        return module if is_experts(module) else super().experts(path)

    def gain(self, path: str) -> Tensor:
        return gain_of(self._module(path))

    def dense(self, path: str) -> Dense:
        """The weights at `path`, [out, in], in the type of sums. Raises AdapterError where it has none of its
        own."""
        module, site = self._module(path), self._sites[path]
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            raise AdapterError(f"{path} has no weights that an adapter could be written into")
        if weight is self._model.get_input_embeddings().weight and self._is_tied(weight):
            raise AdapterError(
                f"{path} shares its weight with another module: what is added to one would be added to both"
            )
        bias = getattr(module, "bias", None)
        exact = exact_type(weight.dtype)
        return Dense(
            _turned(weight.detach().to(exact), site), None if bias is None else bias.detach().to(exact)
        )

    @torch.no_grad()
    def replace(self, path: str, dense: Dense) -> None:
        """Replaces the model's weights at `path`, rounded once. Raises AdapterError if they overflow."""
        module, site = self._module(path), self._sites[path]
        for name, tensor in (("weight", _turned(dense.weight, site)), ("bias", dense.bias)):
            own = getattr(module, name, None)
            if own is None and tensor is None:
                continue
            if own is None:
                raise AdapterError(f"{path} has no {name} in this model, and the adapter needs one")
            assert isinstance(own, Tensor) and tensor is not None
            if not bool(tensor.isfinite().all()):
                raise AdapterError(f"{path}: the adapter's numbers are not all finite")
            own.copy_(tensor)

    def _module(self, path: str) -> nn.Module:
        module: nn.Module = self._model.get_submodule(path)
        return module

    def _is_tied(self, weight: Tensor) -> bool:
        head = self._model.get_output_embeddings()
        return head is not None and head.weight is weight


def _turned(weight: Tensor, site: Site) -> Tensor:
    """Transposes a weight between [out, in] and the module's layout."""
    return weight.t() if site.transposed else weight


def load_whole(folder: Path) -> PreTrainedModel:
    """The model in a folder, with its own modules and in the type in which it was saved. Raises
    ModelNotFound, and AdapterError for one that was saved quantized."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{str(folder)!r} is no folder with a model: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise AdapterError(f"{folder} was saved quantized: merge into the model that it was made of")
        model: PreTrainedModel = auto_class(config).from_pretrained(
            folder, config=config, dtype="auto", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"{str(folder)!r} holds no causal language model: {error}") from error
    return model
