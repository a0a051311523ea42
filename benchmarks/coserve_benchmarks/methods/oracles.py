"""Oracles of adapter methods: PEFT's model, or a plain one with hooks where PEFT has no such method."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

_PREFIX = "base_model.model."


class Oracle(Protocol):
    """One adapter on a model of its own."""

    def logits(self, tokens: Tensor) -> Tensor:
        """[rows, vocabulary] of one sequence [rows]."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Trained tensors, by their names in the adapter's file."""
        ...


def oracle_of(model: PreTrainedModel, folder: Path) -> Oracle:
    """The adapter in `folder` on `model`, which is taken over."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    model.requires_grad_(False)
    plain = _PLAIN.get(fields["peft_type"])
    return PeftOracle(model, folder) if plain is None else plain(model, folder, fields)


class PeftOracle:
    """PEFT's own implementation."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        from peft import PeftModel

        self._model = PeftModel.from_pretrained(model, str(folder)).eval()
        stored = load_file(folder / "adapter_model.safetensors")
        self._parameters = {}
        for name, parameter in self._model.named_parameters():
            plain = name.replace(".default", "")
            if plain == "prompt_encoder.embedding.weight":
                plain = "prompt_embeddings"
            if plain not in stored:
                plain = plain.removesuffix(".weight")
            if plain in stored:
                self._parameters[plain] = parameter.requires_grad_()
        assert self._parameters.keys() == stored.keys(), "every tensor of the file is somewhere in the model"

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=tokens[None], attention_mask=torch.ones_like(tokens[None])
        ).logits
        return logits[0, -len(tokens) :]  # behind those of virtual tokens

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters


class HookedOracle(ABC):
    """A model whose modules' outputs pass through `change(path, y)`."""

    def __init__(self, model: PreTrainedModel, folder: Path, fields: Mapping[str, Any]) -> None:
        self._model, self.fields = model, fields
        stored = load_file(folder / "adapter_model.safetensors")
        self._stored: dict[str, Tensor] = {
            name: tensor.clone().requires_grad_() for name, tensor in stored.items()
        }
        ending = f".{self.marker}"
        for name in stored:
            if name.endswith(ending):
                path = name.removeprefix(_PREFIX).removesuffix(ending)
                self._hook(path, model.get_submodule(path))

    marker: str  # what the name of one of a module's tensors ends with

    @abstractmethod
    def change(self, path: str, module: nn.Module, y: Tensor) -> Tensor:
        """Output that the module at `path` should have, given its unmodified output y."""

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits
        return logits[0]

    def parameters(self) -> Mapping[str, Tensor]:
        return self._stored

    def at(self, path: str, name: str) -> Tensor:
        """One of the adapter's tensors at a module."""
        return self._stored[f"{_PREFIX}{path}.{name}"]

    def _hook(self, path: str, module: nn.Module) -> None:
        def changed(own: nn.Module, _: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (self.change(path, own, out[0]), *out[1:])
            return self.change(path, own, out)

        module.register_forward_hook(changed)


class BottleneckOracle(HookedOracle):
    """Two linears and what is between them, after a sublayer."""

    marker = "bottleneck_down.weight"

    def change(self, path: str, module: nn.Module, y: Tensor) -> Tensor:
        inside = F.linear(y, *self._linear(path, "down"))
        return y + F.linear(ACT2FN[self.fields["activation"]](inside), *self._linear(path, "up"))

    def _linear(self, path: str, way: str) -> tuple[Tensor, Tensor]:
        return self.at(path, f"bottleneck_{way}.weight"), self.at(path, f"bottleneck_{way}.bias")


class BitFitOracle(HookedOracle):
    """Replaces a module's bias."""

    marker = "bias"

    def change(self, path: str, module: nn.Module, y: Tensor) -> Tensor:
        own: Tensor | None = getattr(module, "bias", None)
        bias = self.at(path, "bias")
        return y + (bias if own is None else bias - own)


_PLAIN: Mapping[str, type[HookedOracle]] = {
    "COSERVE_BOTTLENECK": BottleneckOracle,
    "COSERVE_BITFIT": BitFitOracle,
}
