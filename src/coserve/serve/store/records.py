"""Records of the store: plain and frozen. Times are whole Unix seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from coserve.core.job_status import JobStatus

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant: an owner of keys, files, jobs and adapters. Its share of the machine is `weight` over the sum
    of all that want some."""

    id: str
    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as it may be shown: the secret itself is nowhere."""

    id: str
    tenant: str  # the tenant's name
    prefix: str
    created: int
    revoked: int | None = None


@dataclass(frozen=True, slots=True)
class File:
    """An uploaded or a result file; its bytes lie at `Store.file_path`."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int
    suffix: str  # of the file on disk: .jsonl, .txt or .csv
    examples: int | None = None  # in training data


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version that can be sampled by `name`. `id` is the key that engines know it by.

    `tenant` is None for adapters that the server was started with: everybody sees them. `step` is set for
    a checkpoint of `job`, which is not listed among models.
    """

    id: str
    name: str
    path: Path
    base: str
    created: int
    tenant: str | None = None
    parent: str | None = None  # name of the adapter that training began with
    job: str | None = None
    step: int | None = None
    pinned: bool = False  # it stays in the engine's memory


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A fine-tuning job.

    `options` and `peft` go to the engine as they
    are. `name` is what the adapter is called once there is one. `pace` is seconds per optimizer step, and
    `stepped` when the last one ended.
    """

    id: str
    tenant: str
    status: JobStatus
    model: str
    name: str
    base: str
    created: int
    training_file: str
    seed: int
    every: int
    hyperparameters: dict[str, Any]
    options: dict[str, Any]
    peft: dict[str, Any] | list[dict[str, Any]] | None = None  # as asked for
    optimizer: dict[str, Any] | None = None
    validation_file: str | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    start_from: str | None = None  # id of the adapter that training begins with
    finished: int | None = None
    error: dict[str, Any] | None = None
    result_file: str | None = None
    step: int = 0
    steps: int | None = None
    trained_tokens: int = 0
    pace: float | None = None
    stepped: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job; `data` holds the figures of `type` metrics."""

    id: str
    job: str
    created: int
    level: str  # info, warn or error
    message: str
    type: str  # message or metrics
    data: dict[str, Any] | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A job's adapter after some step, in a folder of its own. `metrics` are the losses then known."""

    id: str
    job: str
    step: int
    name: str
    path: Path
    digest: str
    created: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """Something that brought engines down. `kind` is request, job, adapter or check, and `subject` its id;
    `details` is what a request asked for."""

    id: str
    kind: str
    subject: str
    reason: str
    created: int
    tenant: str | None = None
    details: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A stretch of a list; `has_more` says that it goes on after the last record."""

    records: tuple[R, ...]
    has_more: bool
