"""Events: outcomes of a step for requests and jobs, without tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from coserve.core.plan import MicroBatchOutput, TokenLogprobs, Updated
from coserve.core.request import FinishReason
from coserve.core.sequence import Direction
from coserve.errors import CoserveError


class TokenEvent(msgspec.Struct, frozen=True):
    """A sequence's next token. `token` is None where a step only scored part of a prompt.

    `prompt_logprobs` continue those of the sequence's last event: each position is reported once, even if a
    preemption made it run twice. The answer's first token has the number of `cached` prompt tokens. `pooled`
    is a part of an embedding (`Sampled`), which `restarts` where a preempted prompt is read anew.
    """

    key: int
    request_id: str
    token: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached: int = 0
    pooled: bytes = b""
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended between two steps: by cancellation, or a stop string in its text.

    Only the last event of a sequence has a finish reason.
    """

    key: int
    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A sequence ended with an error, instead of a `Finished`."""

    key: int
    request_id: str
    error: CoserveError


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Rows of one job passed layers. In `rows` a row that passed half of the layers counts as half a row, and
    the tail as one layer."""

    job: str
    micro_batch: int
    direction: Direction
    rows: float


@dataclass(frozen=True, slots=True)
class PassDone:
    """All micro-batches of a job's pass are done, with these outputs by key; its optimizer has not
    stepped."""

    job: str
    outputs: Mapping[int, MicroBatchOutput]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A job's optimizer stepped; the job waits for its next micro-batches."""

    job: str
    updated: Updated


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job failed and has left the schedule."""

    job: str
    error: CoserveError


Event = TokenEvent | Finished | RequestFailed | TrainingProgress | PassDone | StepDone | JobFailed
