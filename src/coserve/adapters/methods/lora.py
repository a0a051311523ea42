"""LoRA: y + (alpha / rank) · dropout(x) Aᵀ Bᵀ (rsLoRA: alpha / √rank)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.errors import AdapterError
from coserve.kernels import dropout, lora


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Which linears get a low-rank bypass, and how strong it is.

    `targets` are names or path endings of linears in the decoder layers; empty means all of them.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0  # of the bypass's input, while training
    targets: tuple[str, ...] = ()
    rslora: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise AdapterError(f"a LoRA adapter needs a whole rank of at least 1, not {self.rank!r}")
        if isinstance(self.targets, str):
            raise AdapterError(f"LoRA targets are several names, not one: ({self.targets!r},)")
        if not 0.0 <= self.dropout < 1.0:
            raise AdapterError(f"LoRA dropout must be in [0, 1), not {self.dropout}")
        if not math.isfinite(self.alpha):
            raise AdapterError(f"LoRA alpha must be a finite number, not {self.alpha}")

    def scale(self, rank: int) -> float:
        """The factor of a bypass whose matrices have this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)

    def matches(self, path: str) -> bool:
        """Whether the linear at `path` is a target."""
        return not self.targets or any(path == t or path.endswith("." + t) for t in self.targets)


@dataclass(frozen=True, slots=True, eq=False)
class LoRABypass:
    """a [rank, in], b [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    @staticmethod
    def fresh(
        in_features: int, out_features: int, config: LoRAConfig, generator: torch.Generator
    ) -> "LoRABypass":
        """A as PEFT draws it (Kaiming uniform with a = √5), B zero; float32, on the CPU."""
        bound = 1 / math.sqrt(in_features)
        a = torch.empty(config.rank, in_features).uniform_(-bound, bound, generator=generator)
        return LoRABypass(a, torch.zeros(out_features, config.rank), config.scale(config.rank))

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.a, self.b)

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> "LoRABypass":
        a, b = parameters
        return LoRABypass(a, b, self.scale)

    def add_(self, x: Tensor, y: Tensor) -> None:
        lora.add_(x, y, self.a, self.b, self.scale)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return lora.add(x, y, self.a, self.b, self.scale)

    def dropping(self, mask: dropout.Mask) -> "DroppingLoRA":
        """The same bypass with its input dropped out, for some rows of a training step."""
        return DroppingLoRA(self, mask)


@dataclass(frozen=True, slots=True, eq=False)
class DroppingLoRA:
    """A LoRA bypass while it trains with dropout."""

    bypass: LoRABypass
    mask: dropout.Mask

    def add_(self, x: Tensor, y: Tensor) -> None:
        self.bypass.add_(self.mask(x), y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bypass.add(self.mask(x), y)
