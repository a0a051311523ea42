"""Settings of the scheduler."""

from dataclasses import dataclass
from typing import Final

from coserve.core.row_buckets import EXACT, RowBuckets
from coserve.core.speculation import SpeculativeConfig
from coserve.errors import ConfigError
from coserve.schedule.overlap import ALONE, Overlap

# Fields that only the engine may set, from its model and its own settings.
SET_BY_ENGINE: Final = frozenset(
    {
        "layers", "max_positions", "eos_token_ids", "max_running", "prefix_sharing", "interruptible",
        "row_buckets", "overlap", "kept_states", "state_rows", "speculation",
        "sequence_pages",
    }
)  # fmt: skip


_RESERVED: Final = 512  # products are at the matrix rate from 128 rows on; 2,048 take 0.3 GB of 255M's layers


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler. Times are in seconds, rows are tokens in one step."""

    layers: int  # depth of the base model
    max_positions: int  # longest prompt and answer together, tokens
    eos_token_ids: tuple[int, ...] = ()  # any of them ends an answer, unless it ignores them
    max_running: int = 64  # sequences with pages at once; more wait
    max_prefill_rows: int = 2048  # prompt rows in one step where no request has a bound
    bounded_prefill_rows: int = 512  # the same with bounds: more make a prompt quicker and others slower
    min_prefill_rows: int = 16  # prompt rows that run even where they break a bound between tokens
    max_training_rows: int | None = None  # largest training window; None: by the cost model (`reserved_rows`)
    min_training_rows: int = 32  # smallest window tried when time is short; a quarter of it for the loss
    training_window: int | None = None  # rows of every window, never cut (a quarter for the loss); None: free
    micro_batches_in_flight: int = 2  # of one job at once; each costs bytes of activations
    quantum: float = 0.03  # training in a step without inference: the longest wait of an arrival
    max_quantum: float = 0.5  # the same where arrivals stop training, or recent requests were patient
    interruptible: bool = False  # whether arrivals stop the training of every step: all are announced
    quantum_with_inference: float = 0.1  # the same beside inference, which it delays; see policy `hybrid`
    slowdown: float | None = 1.5  # by training, of answers while no bound is in force; None: any
    reliability: float = 0.99  # share of answers that are to keep a bound on their tokens; more train less
    max_margin: float = 1.0  # most that is allowed for, relative to a prediction; more would stop training
    # Seconds of a delay of the host that is expected though recent steps show none; 3.5 ms on a GPU.
    rare_delay: float = 0.0
    starvation: float | None = None  # seconds after which a job gets one piece despite bounds; None: never
    patience: float = 10.0  # deadline of waiting requests that state none; smaller lets fewer pass
    prefix_sharing: bool = False  # whether common prefixes of prompts are computed once
    kept_states: int = 0  # slots for states of recurrent layers behind such prefixes
    state_rows: int | None = None  # training windows begin at multiples of so many rows of a micro-batch
    row_buckets: RowBuckets = EXACT  # the device's: prompts are cut where no padding is needed
    overlap: Overlap = ALONE  # of the executor's plans
    speculation: SpeculativeConfig | None = None  # whether sequences draft their next tokens
    sequence_pages: int | None = None  # most of one sequence; None: all, a cluster's workers may have fewer

    @property
    def reserved_rows(self) -> int:
        """Rows of the largest window that memory is reserved for. Larger ones read the weights less often,
        and run alone where memory is free for them (`TrainingPacker`), unless `max_training_rows` says
        otherwise."""
        return _RESERVED if self.max_training_rows is None else self.max_training_rows

    @property
    def sampled_rows(self) -> int:
        """Most rows of answers in a step of which tokens are sampled: each sequence's, and drafts, also where
        one sequence is all that may run."""
        return self.max_running + (self.speculation.num_speculative_tokens if self.speculation else 0)

    def __post_init__(self) -> None:
        checks = {
            "layers": self.layers >= 1,
            "max_positions": self.max_positions >= 1,
            "max_running": self.max_running >= 1,
            "max_prefill_rows": self.max_prefill_rows >= 1,
            "bounded_prefill_rows": self.bounded_prefill_rows >= 1,
            "min_prefill_rows": 1 <= self.min_prefill_rows <= self.prefill_rows(bounded=True),
            "max_training_rows": self.max_training_rows is None or self.max_training_rows >= 1,
            "min_training_rows": 1 <= self.min_training_rows <= self.reserved_rows,
            "training_window": self.training_window is None or self.training_window >= 1,
            "micro_batches_in_flight": self.micro_batches_in_flight >= 1,
            "quantum": self.quantum > 0,
            "max_quantum": self.max_quantum > 0,
            "quantum_with_inference": self.quantum_with_inference >= 0,
            "slowdown": self.slowdown is None or self.slowdown >= 1,
            "reliability": 0 <= self.reliability < 1,
            "max_margin": self.max_margin >= 0,
            "rare_delay": self.rare_delay >= 0,
            "starvation": self.starvation is None or self.starvation >= 0,
            "patience": self.patience >= 0,
            "overlap": self.overlap.is_possible,
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigError(f"scheduler.{name} is out of its range: {getattr(self, name)}")

    def prefill_rows(self, bounded: bool) -> int:
        """Most prompt rows in a step; `bounded` is whether a request has a bound."""
        return min(self.max_prefill_rows, self.bounded_prefill_rows) if bounded else self.max_prefill_rows
