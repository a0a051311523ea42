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

from coserve.adapters.bypass import Bypass, exact_type
from coserve.adapters.method import named
from coserve.adapters.saved import PREFIX, Saved
from coserve.adapters.sites import Frame
from coserve.errors import AdapterError, AdapterMismatch

LAYOUT: Final = "0.19.1"  # the first version of PEFT that lays matrices out as they are written here
_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")
PARAMETERS: Final = ("gate_up_proj", "up_proj", "down_proj")  # that adapters stand beside
# Fields of configurations with the number of a row's experts.
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


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

    def replayed(self, rows: int, dtype: torch.dtype) -> int:
        """Each row's experts keep what enters and leaves their products, and what is between these."""
        wide, inside = _widths(self.experts, self._first)[1], _widths(self.experts, "down_proj")[1]
        ranks = sum(down.shape[1] for down in self.down.values())
        return 2 * rows * self._chosen * (3 * wide + 4 * inside + ranks) * dtype.itemsize

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The mixture's output for the rows x of `pack_rows`; y, that of the base alone, is not used."""
        width = y.shape[-1]
        chosen = (x.shape[-1] - width) // 2
        hidden, weights, numbers = torch.split(x, [width, chosen, chosen], -1)
        hidden, index, own = hidden.to(y.dtype), numbers.long(), self.experts
        found = torch.zeros_like(y, dtype=x.dtype)
        for expert in torch.unique(index).tolist():
            rows, place = torch.where(index == expert)
            inside = self._product(self._first, expert, hidden[rows])
            inside = own._apply_gate(inside) if own.has_gate else own.act_fn(inside)  # type: ignore[operator]
            out = self._product("down_proj", expert, inside)
            if own.has_post_expert_norm:
                out = own.post_expert_norm(out)  # type: ignore[operator]
            found = found.index_add(0, rows, out.to(x.dtype) * weights[rows, place, None])
        return found.to(y.dtype)

    @property
    def _first(self) -> str:
        """The parameter that multiplies the inputs."""
        return "gate_up_proj" if self.experts.has_gate else "up_proj"

    @property
    def _chosen(self) -> int:
        """The number of a row's experts; of all where the configuration does not tell."""
        config = getattr(self.experts, "config", None)
        found = (getattr(config, name, None) for name in _CHOSEN)
        return next((number for number in found if type(number) is int), len(self.experts.down_proj))  # type: ignore[arg-type]

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


def chosen_parameters(names: Sequence[str], frame: Frame) -> dict[str, list[str]]:
    """The parameters of fused experts that `target_parameters` choose, as PEFT does, by their module, in the
    order in which PEFT wraps the module."""
    endings, found = frozenset(names), dict[str, list[str]]()
    for full in frame.modules.parameters:
        path, _, name = full.rpartition(".")
        if path in frame.modules.fused and named(full, endings):
            found.setdefault(path, []).append(name)
    return found


def expect_parameters(names: Sequence[str], frame: Frame) -> dict[str, list[str]]:
    """As `chosen_parameters`. Raises AdapterMismatch for a name that chooses none beside which an adapter can
    stand."""
    found = chosen_parameters(names, frame) if names else {}
    there = [f"{path}.{name}" for path, own in found.items() for name in own]
    for full in there:
        if full.rpartition(".")[2] not in PARAMETERS:
            raise AdapterMismatch(f"no adapter stands beside {full}: only beside {', '.join(PARAMETERS)}")
    for name in names:
        if not any(named(full, (name,)) for full in there):
            own = (full.split(".")[-2:] for full in frame.modules.parameters if _is_offered(full, frame))
            known = ", ".join(sorted({".".join(ending) for ending in own}))
            raise AdapterMismatch(
                f"no parameter of fused experts of the model is called {name}"
                + (
                    f"; there are {known}"
                    if known
                    else ", which has no such experts: name linears as targets"
                )
            )
    return found


def _is_offered(full: str, frame: Frame) -> bool:
    path, _, name = full.rpartition(".")
    return path in frame.modules.fused and name in PARAMETERS


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
        if name not in PARAMETERS or not isinstance(weight, Tensor):
            raise AdapterMismatch(f"{saved.folder}: no adapter stands beside {path}.{name}")
        a, b, rank = saved.tensor(of_a), saved.tensor(of_b), ranks[name]
        experts, wide, out = _widths(module, name)
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


def fresh_experts(
    frame: Frame,
    path: str,
    parameters: Sequence[str],
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
    generator: torch.Generator,
) -> ExpertsLoRA:
    """LoRA beside parameters of the module at `path` that changes nothing, drawn as PEFT draws it."""
    module, down, up = frame.frozen.experts(path), dict[str, Tensor](), dict[str, Tensor]()
    for name in parameters:
        experts, wide, out = _widths(module, name)
        bound = 1 / math.sqrt(wide)
        a = torch.empty(experts, ranks[name], wide, dtype=torch.float32)
        down[name] = a.uniform_(-bound, bound, generator=generator)
        up[name] = torch.zeros(experts, out, ranks[name], dtype=torch.float32)
    return ExpertsLoRA(module, down, up, scales)


def _widths(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The number of experts of a parameter, and the widths of its inputs and outputs."""
    experts, first, second = getattr(module, name).shape
    return (experts, first, second) if module.is_transposed else (experts, second, first)


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
