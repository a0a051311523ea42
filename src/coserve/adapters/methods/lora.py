"""LoRA: y + (alpha / rank) · dropout(x) Aᵀ Bᵀ (rsLoRA: alpha / √rank). Hu et al. 2021; Kalajdzievski 2023."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import torch
from torch import Tensor

from coserve.adapters.bypass import Bypass, Dense, Operator, Part, Place, Side, exact_type
from coserve.adapters.method import Written, chosen
from coserve.adapters.saved import PREFIX, Saved, expect_shape, site_at
from coserve.adapters.sites import Frame, Kind
from coserve.errors import AdapterError
from coserve.kernels import lora
from coserve.kernels.dropout import Mask

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Which linears get a low-rank bypass, and how strong it is.

    `targets` are names or path endings of linears; empty means all in the decoder layers. The patterns give
    other ranks and alphas to some of them, by name, path ending or regular expression, as in PEFT.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # of the bypass's input, while training
    targets: tuple[str, ...] = ()
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if not isinstance(rank, int) or rank < 1:
                raise AdapterError(f"a LoRA adapter needs a whole rank of at least 1, not {rank!r}")
        if isinstance(self.targets, str):
            raise AdapterError(f"LoRA targets are several names, not one: ({self.targets!r},)")
        if not 0.0 <= self.dropout < 1.0:
            raise AdapterError(f"LoRA dropout must be in [0, 1), not {self.dropout}")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not math.isfinite(alpha):
                raise AdapterError(f"LoRA alpha must be a finite number, not {alpha}")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise AdapterError(
                    f"the LoRA pattern {pattern!r} is no regular expression: {error}"
                ) from error

    def rank_of(self, path: str) -> int:
        """The rank of the bypass at `path`."""
        return _matching(self.rank_pattern, path, self.rank)

    def scale(self, path: str, rank: int) -> float:
        """The factor of the bypass at `path` whose matrices have this rank."""
        alpha = _matching(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _matching(pattern: Mapping[str, _Number], path: str, default: _Number) -> _Number:
    """The first entry whose key is the path's end, read as a regular expression."""
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", path):
            return value
    return default


@dataclass(frozen=True, slots=True, eq=False)
class LoRABypass(Bypass):
    """a [rank, in], b [out, rank]."""

    operators = (Operator.LINEAR, Operator.LINEAR)
    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0

    def parameters(self) -> Mapping[str, Tensor]:
        return {"lora_A": self.a, "lora_B": self.b}

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "LoRABypass":
        return replace(self, a=parameters["lora_A"], b=parameters["lora_B"])

    def add_(self, x: Tensor, y: Tensor) -> None:
        lora.add_(x, y, self.a, self.b, self.scale)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return lora.add(x, y, self.a, self.b, self.scale)

    def dropping(self, mask: Mask) -> "DroppingLoRA":
        return DroppingLoRA(self, mask)

    def merged(self, dense: Dense, side: Side) -> Dense:
        exact = exact_type(dense.weight.dtype)
        return replace(dense, weight=dense.weight + self.scale * (self.b.to(exact) @ self.a.to(exact)))


@dataclass(frozen=True, slots=True, eq=False)
class DroppingLoRA(Bypass):
    """A LoRA bypass while it trains with dropout."""

    operators = LoRABypass.operators
    bypass: LoRABypass
    mask: Mask

    def parameters(self) -> Mapping[str, Tensor]:
        return self.bypass.parameters()

    def with_parameters(self, parameters: Mapping[str, Tensor]) -> "DroppingLoRA":
        return replace(self, bypass=self.bypass.with_parameters(parameters))

    def add_(self, x: Tensor, y: Tensor) -> None:
        self.bypass.add_(self.mask(x), y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bypass.add(self.mask(x), y)


class LoRA:
    """Low-rank bypasses beside linears."""

    name, peft_type, config = "lora", "LORA", LoRAConfig
    aliases: Final = {
        "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets",
        "use_rslora": "rslora", "use_dora": "dora",
    }  # fmt: skip

    def fresh(self, config: LoRAConfig, frame: Frame, generator: torch.Generator) -> Part:
        """A as PEFT draws it (Kaiming uniform with a = √5), B zero."""
        bypasses: dict[Place, Bypass] = {}
        for path, site in chosen(frame, config.targets).items():
            rank = config.rank_of(path)
            bound = 1 / math.sqrt(site.inputs)
            a = torch.empty(rank, site.inputs).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(site.outputs, rank)
            bypasses[Place(path)] = LoRABypass(a, b, config.scale(path, rank), config.dropout)
        return Part(self.name, config, bypasses)

    def read(self, saved: Saved, frame: Frame) -> Part:
        config = _read_config(saved)
        bypasses: dict[Place, Bypass] = {}
        for path, (a, b) in saved.pairs("lora_A.weight", "lora_B.weight").items():
            site = site_at(frame.sites, path, Kind.LINEAR)
            rank = len(a)
            expect_shape(site, "lora_A", a, max(rank, 1), site.inputs)
            expect_shape(site, "lora_B", b, site.outputs, rank)
            bypasses[Place(path)] = LoRABypass(a, b, config.scale(path, rank), config.dropout)
        return Part(self.name, config, bypasses)

    def write(self, part: Part) -> Written:
        config = part.config
        assert isinstance(config, LoRAConfig)
        fields = {
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_rslora": config.rslora,
            "rank_pattern": {
                _anchored(path): len(b.a) for path, b in _linears(part) if len(b.a) != config.rank
            },
            "alpha_pattern": dict(config.alpha_pattern),
            "bias": "none",
            "target_modules": sorted(place.path for place in part.bypasses),
        }
        tensors = {
            f"{PREFIX}{path}.{name}.weight": tensor
            for path, bypass in _linears(part)
            for name, tensor in bypass.parameters().items()
        }
        return Written(fields, tensors)


def _read_config(saved: Saved) -> LoRAConfig:
    saved.ignore("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying")
    init = saved.fields.get("init_lora_weights")
    if isinstance(init, str) and init != "gaussian":
        raise AdapterError(f"{saved.folder}: init_lora_weights={init!r} changes the base's weights")
    saved.ignore("init_lora_weights")
    if saved.take("bias", "none") != "none":
        raise AdapterError(f"{saved.folder}: bias={saved.fields['bias']!r} is not supported")
    return LoRAConfig(
        rank=saved.take("r", 8),
        alpha=saved.take("lora_alpha", 8.0),
        dropout=saved.take("lora_dropout", 0.0),
        rslora=saved.take("use_rslora", False),
        rank_pattern=saved.take("rank_pattern", {}),
        alpha_pattern=saved.take("alpha_pattern", {}),
    )


def _linears(part: Part) -> "list[tuple[str, LoRABypass]]":
    return [(place.path, b) for place, b in part.bypasses.items() if isinstance(b, LoRABypass)]


def _anchored(path: str) -> str:
    return f"^{re.escape(path)}$"


METHOD = LoRA()
