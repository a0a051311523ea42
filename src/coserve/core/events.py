"""Events: outcomes of a step for requests and jobs. Plain data, no tensors."""

from dataclasses import dataclass

from coserve.core.plan import TokenLogprobs, Updated
from coserve.core.request import FinishReason
from coserve.core.sequence import Direction
from coserve.errors import CoserveError


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sequence's next token. `token` is None where a step only scored part of a prompt.

    `prompt_logprobs` continue where the last event of this sequence stopped: a position is reported
    once, even if a preemption made it run twice. The answer's first token tells how many tokens of the prompt
    were found in the cache, as `cached`.
    """

    key: int
    request_id: str
    token: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended between two steps: it was cancelled, or a stop string was found in its text.

    Exactly one event of each sequence carries a finish reason, its last.
    """

    key: int
    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A sequence ended with an error; this event takes the place of its `Finished`."""

    key: int
    request_id: str
    error: CoserveError


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Rows of one job passed layers. `rows` counts a row that passed half of the layers as one half, and one
    that passed the tail as one layer's."""

    job: str
    micro_batch: int
    direction: Direction
    rows: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A job's optimizer stepped; the job waits for its next micro-batches."""

    job: str
    updated: Updated


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job cannot go on and has left the schedule."""

    job: str
    error: CoserveError


Event = TokenEvent | Finished | RequestFailed | TrainingProgress | StepDone | JobFailed
