"""Learning-rate schedules as pure functions of the step, equal to those of transformers."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from coserve.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "constant_with_warmup"]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of every optimizer step.

    It rises from 0 to `peak` over the warm-up and then stays there (`constant`, or in transformers' words
    `constant_with_warmup`), falls linearly to 0 at `total_steps` (`linear`), in half a cosine wave to
    `minimum` (`cosine`), or with 1 / sqrt(step) (`inverse_sqrt`). Warm-up is a number of steps or a share of
    `total_steps`, rounded up.
    """

    peak: float
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # instead of warmup_steps; needs total_steps
    total_steps: int | None = None  # where linear and cosine end; the other two do not need it
    minimum: float = 0.0  # a rate, not a share of the peak; only cosine ends there

    def __post_init__(self) -> None:
        ends = self.schedule in ("linear", "cosine") or self.warmup_ratio > 0.0
        checks = {
            "peak must be a finite number above 0": 0.0 < self.peak < math.inf,
            f"schedule must be one of {', '.join(get_args(Schedule))}": self.schedule in get_args(Schedule),
            "warmup_steps must be >= 0": self.warmup_steps >= 0,
            "warmup_ratio must be from 0 to 1": 0.0 <= self.warmup_ratio <= 1.0,
            "warmup_steps and warmup_ratio exclude each other": not (self.warmup_steps and self.warmup_ratio),
            "total_steps must be >= 1": self.total_steps is None or self.total_steps >= 1,
            "total_steps is needed for this schedule": self.total_steps is not None or not ends,
            "minimum must be from 0 to peak": 0.0 <= self.minimum <= self.peak,
            "minimum needs the cosine schedule": self.minimum == 0.0 or self.schedule == "cosine",
        }
        for rule, holds in checks.items():
            if not holds:
                raise ConfigError(f"learning_rate.{rule}")

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * (self.total_steps or 0))

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0. With a warm-up, that of step 0 is 0."""
        if step < self.warmup:
            return self.peak * (step / self.warmup)
        match self.schedule:
            case "constant" | "constant_with_warmup":
                return self.peak
            case "inverse_sqrt":
                # Without a warm-up there is no natural time scale; transformers takes 10 000 steps.
                scale = self.warmup or 10_000
                return self.peak / math.sqrt((step + scale - self.warmup) / scale)
            case "linear":
                return self.peak * (1.0 - self._progress(step))
            case "cosine":
                wave = 0.5 * (1.0 + math.cos(math.pi * self._progress(step)))
                return self.minimum + (self.peak - self.minimum) * wave

    def _progress(self, step: int) -> float:
        """Share of the way from the warm-up's end to `total_steps`; 1 from there on, where the cosine of
        transformers would rise again."""
        total = self.total_steps or 0
        return min((step - self.warmup) / max(1, total - self.warmup), 1.0) if step < total else 1.0
