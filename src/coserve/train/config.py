"""Settings of a fine-tuning job."""

import math
from dataclasses import dataclass
from typing import get_args

from coserve.errors import ConfigError
from coserve.train.example import LossOn
from coserve.train.rates import Schedule
from coserve.train.save_policy import SavePolicy, SavePolicySetting, save_policy


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Settings of a fine-tuning job.

    `batch_size` examples make one optimizer step, in any number of micro-batches of at most `rows` rows.
    Training ends after `max_steps` steps if `epochs` take more.
    """

    learning_rate: float = 2e-4
    schedule: Schedule = "linear"  # after the warm-up
    warmup_ratio: float = 0.03
    warmup_steps: int = 0  # instead of the ratio, if not 0
    batch_size: int = 8
    epochs: int = 1
    max_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0  # None does not clip
    seed: int = 0
    max_length: int | None = None  # tokens an example is cut to; None cuts nothing
    loss_on: LossOn = "assistant"  # or "all"
    rows: int = 2048
    keep: SavePolicySetting = SavePolicy.INPUTS  # or the bytes that a micro-batch's activations may take
    weight: float = 1.0  # share among jobs that train at the same time

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "rows", "learning_rate", "weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"training.{name} must be positive, not {getattr(self, name)}")
        for name in ("batch_size", "epochs", "rows", "seed"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"training.{name} must be an integer, not {getattr(self, name)!r}")
        if self.max_steps is not None and (type(self.max_steps) is not int or self.max_steps < 1):
            raise ConfigError(f"training.max_steps must be at least 1, not {self.max_steps}")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ConfigError(f"training.warmup_steps must be at least 0, not {self.warmup_steps!r}")
        checks = {
            "warmup_ratio": 0.0 <= self.warmup_ratio <= 1.0,
            "learning_rate": math.isfinite(self.learning_rate),
            "weight_decay": 0.0 <= self.weight_decay < math.inf,
            "betas": len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas),
            "epsilon": 0.0 < self.epsilon < math.inf,
            "max_grad_norm": self.max_grad_norm is None or self.max_grad_norm > 0,
            "loss_on": self.loss_on in get_args(LossOn),
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigError(f"training.{name} is out of its range: {getattr(self, name)}")
        object.__setattr__(self, "keep", save_policy(self.keep))  # a name stands for the setting
