"""Oracles of the methods that PEFT has not: transformers' own model with plain torch modules in it, and files
written as `docs/methods.md` describes them. Nothing here uses coserve.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models import make_eager, tiny

SUBLAYERS = {"houlsby": ("self_attn", "attn", "mlp"), "pfeiffer": ("mlp",)}
_LISTED = ("v_proj", "o_proj", "c_attn", "c_proj")
_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Plain:
    """A model whose `trainable` parameters are the adapter, by the names that files have for them."""

    def __init__(
        self, model: PreTrainedModel, fields: Mapping[str, Any], trainable: Mapping[str, nn.Parameter]
    ) -> None:
        self.model, self.fields, self.trainable = model, fields, trainable

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        for parameter in self.trainable.values():
            parameter.grad = None

    def double(self) -> None:
        self._go_to(torch.float64)

    def float(self) -> None:
        self._go_to(torch.float32)

    def _go_to(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)
        for parameter in self.trainable.values():  # hooks hold these very ones
            parameter.data = parameter.data.to(dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.fields))
        tensors = {name: p.detach().clone() for name, p in self.trainable.items()}
        save_file(tensors, folder / "adapter_model.safetensors")


def with_bottlenecks(
    name: str, dtype: torch.dtype, layout: str, activation: str, width: int = 6, **changes: Any
) -> Plain:
    """A bottleneck after each sublayer of the layout, with random weights."""
    model = _frozen(name, dtype, **changes)
    generator = torch.Generator().manual_seed(8)
    trainable: dict[str, nn.Parameter] = {}
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in SUBLAYERS[layout]]
    for path in paths:
        down, up = nn.Linear(64, width), nn.Linear(width, 64)
        own = {f"bottleneck_{way}.{n}": p for way, m in (("down", down), ("up", up))
               for n, p in m.named_parameters()}  # fmt: skip
        for parameter in own.values():
            _draw(parameter, generator)
        bottleneck = nn.Sequential(down, _ACTIVATIONS[activation](), up).to(dtype)
        model.get_submodule(path).register_forward_hook(_after(bottleneck))
        trainable |= {f"base_model.model.{path}.{n}": p for n, p in own.items()}
    fields = {"peft_type": "COSERVE_BOTTLENECK", "width": width, "layout": layout, "activation": activation,
              "target_modules": paths}  # fmt: skip
    return Plain(model, fields, trainable)


def with_biases(name: str, dtype: torch.dtype, paths: Sequence[str], **changes: Any) -> Plain:
    """The biases of these modules moved, new ones where there are none."""
    model = _frozen(name, dtype, **changes)
    generator = torch.Generator().manual_seed(9)
    trainable: dict[str, nn.Parameter] = {}
    for path in paths:
        module = model.get_submodule(path)
        bias: Any = getattr(module, "bias", None)
        if bias is None:
            width = len(module.weight)  # of a linear the outputs, of a norm its features
            bias = nn.Parameter(torch.zeros(width, dtype=dtype))
            module.register_forward_hook(_plus(bias))
        change = 0.1 * torch.randn(bias.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            bias.add_(change)
        trainable[f"base_model.model.{path}.bias"] = bias.requires_grad_()
    return Plain(model, {"peft_type": "COSERVE_BITFIT", "target_modules": list(paths)}, trainable)


def with_ia3_and_lora(name: str, dtype: torch.dtype, **changes: Any) -> Plain:
    """A list of two parts that meet at the same linears: y, or x, is scaled, and LoRA adds to what comes of
    it (rank 3, alpha 6)."""
    model = _frozen(name, dtype, **changes)
    generator = torch.Generator().manual_seed(10)
    trainable: dict[str, nn.Parameter] = {}
    paths, scaled = [], []
    for path, module in model.named_modules():
        ending = path.rpartition(".")[2]
        if ending not in _LISTED:
            continue
        outs, ins = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        inside = ending in ("o_proj", "c_proj")
        own = {"0": nn.Parameter(torch.ones((1, ins) if inside else (outs, 1), dtype=dtype)),
               "A": nn.Parameter(torch.zeros(3, ins, dtype=dtype)),
               "B": nn.Parameter(torch.zeros(outs, 3, dtype=dtype))}  # fmt: skip
        for parameter in own.values():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.1 * noise
        if inside:
            module.register_forward_pre_hook(_scaled_input(own["0"]))
        module.register_forward_hook(_scaled_and_lora(None if inside else own["0"], own["A"], own["B"]))
        paths.append(path)
        scaled += [path] * inside
        trainable[f"0:base_model.model.{path}.ia3_l"] = own["0"]
        trainable |= {f"1:base_model.model.{path}.lora_{x}.weight": own[x] for x in "AB"}
    parts = [
        {"peft_type": "IA3", "target_modules": paths, "feedforward_modules": scaled},
        {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": paths},
    ]
    return Plain(model, {"peft_type": "COSERVE_LIST", "parts": parts}, trainable)


def _frozen(name: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    model = tiny(name, dtype, **changes).requires_grad_(False)
    make_eager(model)
    return model


@torch.no_grad()
def _draw(parameter: Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parameter.copy_(noise * (0.7 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2))


def _after(bottleneck: nn.Module) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + bottleneck(output[0]), *output[1:])
        return output + bottleneck(output)

    return hook


def _scaled_input(scales: nn.Parameter) -> Any:
    return lambda _module, inputs: (inputs[0] * scales.flatten(), *inputs[1:])


def _scaled_and_lora(scales: nn.Parameter | None, a: nn.Parameter, b: nn.Parameter) -> Any:
    def hook(_module: nn.Module, inputs: Any, output: Any) -> Any:
        if scales is not None:
            output = output * scales.flatten()
        return output + 2.0 * (inputs[0] @ a.t() @ b.t())

    return hook


def _plus(bias: nn.Parameter) -> Any:
    return lambda _module, _inputs, output: output + bias
