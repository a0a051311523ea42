"""The scheduler's question to the runner and its answer. Plain data, no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from coserve.core.sequence import Direction, MicroBatch, Sequence, Span
from coserve.errors import CoserveError


@dataclass(frozen=True, slots=True)
class Segment:
    """What one step does for one sequence: `length` rows from `start`, through the layers of `span`.

    Decode is an INFER segment of length 1, prefill one of length N; training is KEEP segments, later LOSS
    ones and then BACKWARD ones. INFER segments always span the whole model; LOSS ones span the tail, which
    counts as the layer after the last.
    """

    sequence: Sequence | MicroBatch
    start: int
    length: int
    direction: Direction
    span: Span


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages of an adapter version's virtual tokens, for every sequence that uses it to read.

    They hold `tokens` tokens, the last page perhaps only a part. The last `rows` of these pass through the
    model; keys and values of those before are the adapter's own.
    """

    adapter: str
    pages: tuple[int, ...]
    tokens: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """What runs on a `share` (up to 1) of the machine, in one pass over the weights."""

    share: float
    inference: tuple[Segment, ...]
    training: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work.

    `prefixes` have got their pages just now and are filled before any sequence is looked at.
    `updates` are jobs whose optimizer steps after the segments have run; `released` are keys of sequences
    and micro-batches that ended since the last plan, whose device state the runner drops before anything
    else. `predicted` is what the cost model expects, in seconds. `split` is the share of the machine that
    inference has, beside training in a lane of its own; None fuses them. A step does not wait for training
    beside its inference: that may go on through further steps, as long as they are split and bring no other.
    `pause` is how long nothing runs although somebody waits, seconds.
    """

    inference: tuple[Segment, ...] = ()
    training: tuple[Segment, ...] = ()
    updates: tuple[str, ...] = ()
    released: tuple[int, ...] = ()
    predicted: float = 0.0
    prefixes: tuple[Prefix, ...] = ()
    split: float | None = None
    pause: float = 0.0

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What runs side by side."""
        if self.split is None:
            return (Lane(1.0, self.inference, self.training),)
        return Lane(self.split, self.inference, ()), Lane(1 - self.split, (), self.training)

    @property
    def is_empty(self) -> bool:
        return not (self.inference or self.training or self.updates or self.released)

    @property
    def is_fused(self) -> bool:
        """Whether inference and training share a pass over the weights."""
        return bool(self.inference) and bool(self.training) and self.split is None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the likeliest alternatives, natural logarithm."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled for one sequence. `prompt_logprobs` covers the prompt positions that this step
    scored, in order (the first prompt token has none and is never in it)."""

    token: int | None  # None where a prefill chunk ended before the prompt did
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """What one optimizer step did: mean loss per label, its labels, the gradient's norm before clipping, and
    how many rows passed there and back."""

    step: int
    loss: float
    labels: int
    grad_norm: float
    learning_rate: float
    version: str  # key of the adapter version this step published
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer. Keys are sequence keys (`sampled`) and job ids (`updated`, `failed`).

    `trained` are the segments of training that have been done since the last answer, None for those of the
    plan. `lanes` are the seconds of the inference and of the training that a split machine did, 0 where there
    was none or it is not done.
    """

    seconds: float
    sampled: Mapping[int, Sampled] = field(default_factory=dict)
    updated: Mapping[str, Updated] = field(default_factory=dict)
    failed: Mapping[str, CoserveError] = field(default_factory=dict)
    trained: tuple[Segment, ...] | None = None
    lanes: tuple[float, float] = (0.0, 0.0)


class Runner(Protocol):
    """Anything that can run a plan: the local runner, a scripted fake, later a split or remote one."""

    def run(self, plan: Plan) -> StepResult: ...
