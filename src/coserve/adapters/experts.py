"""LoRA beside the experts of a mixture that are one tensor (PEFT's `target_parameters`).

An expert's product gets a low-rank one beside it, before the gate, so the rows of an adapter pass the experts
on their own: x of the bypass is what the mixture's module is given, and its output replaces the module's.

PEFT flattens the matrices of all experts, A to [rank · experts, a] and B to [b, rank · experts] with the
expert's number last. Which of a and b is the width of the inputs has changed (`_acts_on_inputs`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bypass import Bypass, exact_type
from coserve.adapters.method import named
from coserve.adapters.saved import PREFIX, Saved
from coserve.adapters.sites import Frame
from coserve.errors import AdapterError, AdapterMismatch

LAYOUT: Final = "0.19.1"  # the first version of PEFT that lays matrices out as they are written here
_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")
# Attributes of a module that transformers' interface for experts computes.
_INTERFACE: Final = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


def is_experts(module: nn.Module) -> bool:
    """Tells whether transformers' interface for experts computes a module, so that its parts are known."""
    down = getattr(module, "down_proj", None)
    is_whole = isinstance(down, Tensor) and down.ndim == 3
    return is_whole and all(isinstance(getattr(module, name, None), bool) for name in _INTERFACE)


def pack_rows(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Arguments of a mixture's module side by side, a line for each row: hidden [rows, width], the experts'
    numbers and weights [rows, experts of a row]."""
    exact = exact_type(hidden.dtype)
    return torch.cat((hidden.to(exact), weights.to(exact), index.to(exact)), -1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsLoRA(Bypass):
    """LoRA beside parameters of `experts`, a module of the base: by their names `down` [experts, rank, in],
    `up` [experts, out, rank] and scales. The base's weights are read where the module has them in a pass."""

    experts: nn.Module
    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]
    scales: Mapping[str, float]

    def parameters(self) -> Mapping[str, Tensor]:
        pairs = (("lora_A", self.down), ("lora_B", self.up))
        return {f"{name}.{side}": tensor for side, own in pairs for name, tensor in own.items()}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "ExpertsLoRA":
        down, up = ({n: parameters[f"{n}.{side}"] for n in self.down} for side in ("lora_A", "lora_B"))
        return replace(self, down=down, up=up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The mixture's output for the rows x of `pack_rows`; y, that of the base alone, is not used."""
        width = y.shape[-1]
        chosen = (x.shape[-1] - width) // 2
        hidden, weights, numbers = torch.split(x, [width, chosen, chosen], -1)
        hidden, index, own = hidden.to(y.dtype), numbers.long(), self.experts
        found = torch.zeros_like(y, dtype=x.dtype)
        for expert in sorted(set(index.flatten().tolist())):
            rows, place = torch.where(index == expert)
            inside = self._product("gate_up_proj" if own.has_gate else "up_proj", expert, hidden[rows])
            inside = own._apply_gate(inside) if own.has_gate else own.act_fn(inside)  # type: ignore[operator]
            out = self._product("down_proj", expert, inside)
            if own.has_post_expert_norm:
                out = own.post_expert_norm(out)  # type: ignore[operator]
            found = found.index_add(0, rows, out.to(x.dtype) * weights[rows, place, None])
        return found.to(y.dtype)

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        """One expert's product of x [rows, in] with a parameter and the matrices beside it."""
        weight = getattr(self.experts, name)[expert]
        y: Tensor = x @ (weight if self.experts.is_transposed else weight.t())
        if self.experts.has_bias:
            y = y + getattr(self.experts, f"{name}_bias")[expert]
        if name in self.down:
            low = x @ self.down[name][expert].t()
            y = torch.addmm(y, low, self.up[name][expert].t(), alpha=self.scales[name])
        return y


def expect_no_experts(adapter: AdapterVersion) -> None:
    """Raises AdapterError for an adapter with LoRA beside fused experts."""
    if any(isinstance(bypass, ExpertsLoRA) for _, bypass in adapter.placed()):
        raise AdapterError(
            f"{adapter.name} has LoRA beside fused experts (target_parameters), which is served and not "
            "trained here; PEFT trains such adapters"
        )


def chosen_parameters(names: Sequence[str], frame: Frame) -> dict[str, list[str]]:
    """The parameters of fused experts that `target_parameters` choose, as PEFT does, by their module, in the
    order in which PEFT wraps the module."""
    endings, found = frozenset(names), dict[str, list[str]]()
    for full in frame.modules.parameters:
        path, _, name = full.rpartition(".")
        if path in frame.modules.fused and named(full, endings):
            found.setdefault(path, []).append(name)
    return found


def tensor_names(path: str, parameters: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Names in files of A and B by parameter: of those of one module the last one has the outermost layer."""
    names = {}
    for depth, name in enumerate(reversed(parameters)):
        owner = f"{PREFIX}{path}{'.base_layer' * depth}"
        names[name] = f"{owner}.lora_A.weight", f"{owner}.lora_B.weight"
    return names


def take_experts(
    saved: Saved,
    frame: Frame,
    path: str,
    parameters: Sequence[str],
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
) -> ExpertsLoRA:
    """Takes a file's matrices beside parameters of the module at `path`, of these ranks and scales. Raises
    AdapterMismatch."""
    module = frame.frozen.experts(path)
    down, up = dict[str, Tensor](), dict[str, Tensor]()
    for name, (of_a, of_b) in tensor_names(path, parameters).items():
        weight = getattr(module, name, None)
        if name not in ("gate_up_proj", "up_proj", "down_proj") or not isinstance(weight, Tensor):
            raise AdapterMismatch(f"{saved.folder}: no adapter stands beside {path}.{name}")
        a, b, rank = saved.tensor(of_a), saved.tensor(of_b), ranks[name]
        experts, first, second = weight.shape
        wide, out = (first, second) if module.is_transposed else (second, first)
        shapes, flat = (tuple(a.shape), tuple(b.shape)), rank * experts
        direct, turned = ((flat, wide), (out, flat)), ((flat, out), (wide, flat))
        if shapes not in (direct, turned):
            raise AdapterMismatch(
                f"{saved.folder}: {of_a} and {of_b} are {shapes[0]} and {shapes[1]}; beside {path}.{name}, "
                f"of rank {rank}, they would be {direct[0]} and {direct[1]}, or before PEFT {LAYOUT} "
                f"{turned[0]} and {turned[1]}"
            )
        a, b = a.reshape(experts, rank, -1), b.reshape(-1, rank, experts).permute(2, 0, 1)
        if direct == turned:
            is_direct = _acts_on_inputs(saved.fields.get("peft_version"), bool(module.is_transposed))
        else:
            is_direct = shapes == direct
        down[name], up[name] = (a, b) if is_direct else (b.mT, a.mT)
        _expect_products(saved, f"{path}.{name}", down[name], up[name], scales[name])
    down, up = ({name: x.contiguous() for name, x in own.items()} for own in (down, up))
    return ExpertsLoRA(module, down, up, scales)


def written_experts(path: str, bypass: ExpertsLoRA) -> dict[str, Tensor]:
    """The matrices by their names in files, laid out as PEFT does from `LAYOUT` on."""
    order = [name for name, _ in bypass.experts.named_parameters(recurse=False) if name in bypass.down]
    found = {}
    for name, (of_a, of_b) in tensor_names(path, order).items():
        down, up = bypass.down[name], bypass.up[name]
        found[of_a] = down.flatten(0, 1)
        found[of_b] = up.permute(1, 2, 0).flatten(1)
    return found


def _acts_on_inputs(version: Any, is_transposed: bool) -> bool:
    """Tells whether A is given a parameter's inputs in a file of this version of PEFT, where shapes do not
    tell. Weights are [experts, out, in], or transposed. PEFT took the first width for that of the inputs;
    0.19.0 took the outputs for inputs where these are first; files before 0.18 name no version."""
    found = _VERSION.match(version) if isinstance(version, str) else None
    number = (0, 17, 0) if found is None else tuple(int(part or 0) for part in found.groups())
    if number >= (0, 19, 1):
        return True
    return is_transposed and number < (0, 19, 0)


def _expect_products(saved: Saved, what: str, down: Tensor, up: Tensor, factor: float) -> None:
    """Raises AdapterError where an element of an expert's product may overflow the base's type."""
    if down.is_meta or saved.is_known:
        return
    of_down, of_up = (vector_norm(one, math.inf, dim).double() for one, dim in ((down, 2), (up, 1)))
    largest = abs(factor) * max(of_up.max().item(), (of_down * of_up).sum(-1).max().item())
    if not largest <= saved.largest:
        raise AdapterError(
            f"{saved.folder}: the adapter changes weights of {what} by up to {largest:g}; the base computes "
            f"with numbers up to {saved.largest:g}"
        )
