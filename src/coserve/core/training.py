"""Data of a training session that a client drives: examples, optimizer settings, outcomes. No tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from coserve.core.ranges import BELOW_ONE, LARGEST, MOST_DECAY, SMALLEST, check_range
from coserve.errors import RequestError

# The figure of a step, and of a validation: the share of labels that are the likeliest token.
ACCURACY: Final = "mean_token_accuracy"


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
        what = "the optimizer's "
        check_range(f"{what}learning_rate", self.learning_rate, 0.0, LARGEST, error=RequestError)
        check_range(f"{what}eps", self.eps, SMALLEST, LARGEST, error=RequestError)
        check_range(f"{what}weight_decay", self.weight_decay, 0.0, MOST_DECAY, error=RequestError)
        for name in ("beta1", "beta2"):
            check_range(f"{what}{name}", getattr(self, name), 0.0, BELOW_ONE, error=RequestError)
        if self.grad_clip_norm is not None:
            check_range(f"{what}grad_clip_norm", self.grad_clip_norm, SMALLEST, math.inf, error=RequestError)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Outcome of a forward or forward_backward: the loss, summed over all rows, and for each datum the
    log-probability of every target, 0 where a row has none. `losses` are those of the rows, weights included,
    and empty for a loss that has none for each."""

    loss: float
    logprobs: tuple[tuple[float, ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    losses: tuple[tuple[float, ...], ...] = ()
