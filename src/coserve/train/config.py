"""Settings of a fine-tuning job."""

import math
from dataclasses import dataclass
from typing import get_args

from coserve.core.ranges import (
    BELOW_ONE,
    LARGEST,
    MOST_COUNT,
    MOST_DECAY,
    SMALLEST,
    check_choice,
    check_range,
    shown,
)
from coserve.errors import ConfigError
from coserve.train.example import LossOn
from coserve.train.lengths import TooLong
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
    max_length: int | None = None  # most tokens of an example; None is what the model takes
    too_long: TooLong = "error"  # what becomes of longer ones; plain texts are cut into pieces
    loss_on: LossOn = "assistant"  # or "all"
    rows: int = 2048
    keep: SavePolicySetting = SavePolicy.INPUTS  # or the bytes that a micro-batch's activations may take
    weight: float = 1.0  # share among jobs that train at the same time

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "rows", "max_steps", "max_length"):
            if (value := getattr(self, name)) is not None or name in ("batch_size", "epochs", "rows"):
                check_range(f"training.{name}", value, 2 if name == "max_length" else 1, MOST_COUNT, int)
        check_range("training.warmup_steps", self.warmup_steps, 0, MOST_COUNT, int)
        check_range("training.seed", self.seed, -MOST_COUNT, MOST_COUNT, int)
        check_range("training.warmup_ratio", self.warmup_ratio, 0.0, 1.0)
        check_range("training.weight", self.weight, 1e-6, 1e6)
        check_range("training.learning_rate", self.learning_rate, SMALLEST, LARGEST)
        check_range("training.epsilon", self.epsilon, SMALLEST, LARGEST)
        check_range("training.weight_decay", self.weight_decay, 0.0, MOST_DECAY)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ConfigError(f"training.betas must be two numbers, not {shown(self.betas)}")
        for beta in self.betas:
            check_range("training.betas", beta, 0.0, BELOW_ONE)
        if self.max_grad_norm is not None:
            check_range("training.max_grad_norm", self.max_grad_norm, SMALLEST, math.inf)
        check_choice("training.schedule", self.schedule, get_args(Schedule))
        check_choice("training.too_long", self.too_long, get_args(TooLong))
        check_choice("training.loss_on", self.loss_on, get_args(LossOn))
        object.__setattr__(self, "keep", save_policy(self.keep))  # a name stands for the setting
