"""What the scheduler may be told."""

from dataclasses import dataclass

from coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and bounds of one scheduler. Times are in seconds, rows are tokens in one step."""

    layers: int  # depth of the base model
    max_positions: int  # longest prompt and answer together, tokens
    eos_token_ids: tuple[int, ...] = ()  # any of them ends an answer, unless it ignores them
    max_running: int = 64  # sequences with pages at once; more wait
    max_prefill_rows: int = 512  # prompt rows in one step; more make a prompt quicker and others slower
    min_prefill_rows: int = 16  # prompt rows that run even where they break a bound between tokens
    max_training_rows: int = 512  # largest training window; larger ones read the weights less often
    min_training_rows: int = 32  # smallest window tried when time is short; a quarter of it for the loss
    micro_batches_in_flight: int = 2  # of one job on the tape at once; each costs tape bytes
    quantum: float = 0.025  # training in a step without inference: the wait of who arrives meanwhile
    quantum_with_inference: float = 0.1  # most training beside inference, however large the slack
    ride_along: float = 1.0  # training beside requests that state no bound, per second of inference
    caution: float = 2.0  # predictions are taken to be too small by so many times the model's mean error
    starvation: float | None = 0.5  # a job that got nothing for so long gets one piece; None: never
    patience: float = 10.0  # deadline in the waiting line of who states none; smaller lets fewer pass

    def __post_init__(self) -> None:
        checks = {
            "layers": self.layers >= 1,
            "max_positions": self.max_positions >= 1,
            "max_running": self.max_running >= 1,
            "max_prefill_rows": self.max_prefill_rows >= 1,
            "min_prefill_rows": 1 <= self.min_prefill_rows <= self.max_prefill_rows,
            "max_training_rows": self.max_training_rows >= 1,
            "min_training_rows": 1 <= self.min_training_rows <= self.max_training_rows,
            "micro_batches_in_flight": self.micro_batches_in_flight >= 1,
            "quantum": self.quantum > 0,
            "quantum_with_inference": self.quantum_with_inference >= 0,
            "ride_along": self.ride_along >= 0,
            "caution": self.caution >= 0,
            "starvation": self.starvation is None or self.starvation >= 0,
            "patience": self.patience >= 0,
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigError(f"scheduler.{name} is out of its range: {getattr(self, name)}")
