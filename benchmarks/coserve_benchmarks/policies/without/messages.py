"""Messages to and from a contestant's process: lines of JSON on its stdin and stdout.

It gets a `Start`, and then for every round a `Prepare`, a `Begin` and, where it only trains, a `Stop`; it
says `ready` and `done` in every round. Its stdin stays open for as long as its parent lives, and at its end
the process ends at once. Times are seconds of `time.monotonic`, which all processes of a machine share.
"""

from enum import StrEnum
from typing import Literal

import msgspec

from coserve.workload.requests import Workload
from coserve.workload.shapes import ModelShape


class ProcessRole(StrEnum):
    """Role of a process in a round."""

    SERVE = "serve"
    TRAIN = "train"
    BOTH = "both"


class Serving(StrEnum):
    """The ways in which transformers serves on a CPU."""

    STATIC = "static batches"
    SDPA = "continuous batching, sdpa"
    PAGED = "continuous batching, paged|eager"


class Start(msgspec.Struct, frozen=True):
    """Settings of a process: its role, torch's threads, and its niceness."""

    shape: ModelShape
    role: ProcessRole
    threads: int
    nice: int = 0


class Prepare(msgspec.Struct, frozen=True):
    """The next round. `matched` keeps adapters in the base's dtype; None measures what is faster."""

    workload: Workload
    serving: Serving
    matched: bool | None = None


class Begin(msgspec.Struct, frozen=True):
    """Instant at which the load's clock begins."""

    at: float


class Stop(msgspec.Struct, frozen=True):
    """Training ends with the mini-batch that is under way."""


class Outcome(msgspec.Struct):
    """Outcome of a process's round.

    `stamps` are when each token of each answer was there, by order of arrival; `trained` is (when, tokens) of
    each mini-batch, counted when its optimizer step is done; `processor` are seconds, of all its threads.
    """

    stamps: list[list[float]] = []
    trained: list[tuple[float, float]] = []
    losses: list[float] = []
    processor: float = 0.0


class ProcessStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of a process. `matched`, with `ready`, says whether adapters are in the base's dtype."""

    kind: Literal["ready", "done", "failed"]
    matched: bool | None = None
    outcome: Outcome | None = None
    text: str = ""
