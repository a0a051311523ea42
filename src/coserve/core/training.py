"""Data of a training session that a client drives: examples, optimizer settings, outcomes. No tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of a pass. `targets[i]` is the token that row i predicts, -100 for none; `inputs` are the
    numbers that the loss takes for each row, by name."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    inputs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one optimizer step of AdamW. Gradients are clipped to the norm `grad_clip_norm`; None does
    not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None

    def check(self) -> None:
        """Raises RequestError for a setting out of its range."""
        clip = self.grad_clip_norm
        checks = {
            "learning_rate": 0.0 <= self.learning_rate < math.inf,
            "beta1": 0.0 <= self.beta1 < 1.0,
            "beta2": 0.0 <= self.beta2 < 1.0,
            "eps": 0.0 < self.eps < math.inf,
            "weight_decay": 0.0 <= self.weight_decay < math.inf,
            "grad_clip_norm": clip is None or clip > 0.0,
        }
        for name, holds in checks.items():
            if not holds:
                raise RequestError(f"the optimizer's {name} is out of its range: {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Outcome of a forward or forward_backward: the loss, summed over all rows, and for each datum the
    log-probability of every target, 0 where a row has none."""

    loss: float
    logprobs: tuple[tuple[float, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
