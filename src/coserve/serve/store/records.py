"""The tables, and their rows as objects: plain ones once the transaction that brought them has ended.

Changing anything here needs a migration beside it; a test compares the two.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import JSON, Dialect, Float, ForeignKey, Index, Text, TypeDecorator, UniqueConstraint, false
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, registry

from coserve.core.job_status import JobStatus

R = TypeVar("R")
JsonObject = dict[str, Any]
_JSON = JSON(none_as_null=True)


class _AsText(TypeDecorator[Any]):
    """Values of a type that is made from its text, in a column of text."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else self.kind(value)


class TableRow(MappedAsDataclass, DeclarativeBase):
    """Base of all rows. Times are whole Unix seconds."""

    registry = registry(
        type_annotation_map={
            str: Text,
            float: Float,
            Path: _AsText(Path),
            JobStatus: _AsText(JobStatus),
            JsonObject: _JSON,
            dict[str, str]: _JSON,
        }
    )


class Record(TableRow):
    """A row that callers know by its `id`. `number` is the order in which rows came, which lists are sorted
    by; it is never given again."""

    __abstract__ = True
    number: Mapped[int] = mapped_column(primary_key=True, init=False, repr=False, compare=False)
    id: Mapped[str] = mapped_column(unique=True)

    def as_dict(self) -> JsonObject:
        """All fields by name, as JSON has them."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}


class Tenant(Record):
    """An owner of keys, files, jobs and adapters. Its share of the machine is `weight` over the sum of all
    that want some."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    created: Mapped[int] = mapped_column(default=0, compare=False)


class KeyRecord(Record):
    """An API key, of which only the digest is kept."""

    __tablename__ = "keys"

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    prefix: Mapped[str] = mapped_column(index=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    created: Mapped[int]
    revoked: Mapped[int | None] = mapped_column(default=None)


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as it may be shown, with its tenant's name."""

    id: str
    tenant: str
    prefix: str
    created: int
    revoked: int | None = None


class File(Record):
    """An uploaded or a result file; its bytes lie at `Store.file_path`. `suffix` is that of the file on disk
    (.jsonl, .txt or .csv), `examples` their number in training data."""

    __tablename__ = "files"
    __table_args__ = (Index("files_of_tenant", "tenant", "number"),)

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int]
    created: Mapped[int]
    suffix: Mapped[str]
    examples: Mapped[int | None] = mapped_column(default=None)


class Adapter(Record):
    """A version that can be sampled by `name`. `id` is the key that engines know it by.

    `path` is relative to the state folder where it lies there, so that the folder can be moved
    (`Store.folder_of`). `tenant` is None for adapters that the server was started with: everybody sees them.
    `parent` is the name of the adapter that training began with. `step` is set for a checkpoint of `job`,
    which is not listed among models. A `pinned` one stays in the engine's memory.
    """

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant", "name", name="one_adapter_a_name"),)

    name: Mapped[str] = mapped_column(index=True)
    path: Mapped[Path]
    base: Mapped[str]
    created: Mapped[int]
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), default=None)
    parent: Mapped[str | None] = mapped_column(default=None)
    job: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), default=None)
    step: Mapped[int | None] = mapped_column(default=None)
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())


class JobRecord(Record):
    """A fine-tuning job.

    `options` and `peft` go to the engine as they are. `name` is that of the adapter once there is one,
    `start_from` the id of the adapter that training begins with. Files and that adapter may be deleted once
    the job is over, and it still names them: no foreign keys. `pace` is seconds per optimizer step, and
    `stepped` when the last one ended.
    """

    __tablename__ = "jobs"
    __table_args__ = (Index("jobs_of_tenant", "tenant", "number"),)

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    status: Mapped[JobStatus] = mapped_column(index=True)
    model: Mapped[str]
    name: Mapped[str]
    base: Mapped[str]
    created: Mapped[int]
    training_file: Mapped[str]
    seed: Mapped[int]
    every: Mapped[int]
    hyperparameters: Mapped[JsonObject]
    options: Mapped[JsonObject]
    peft: Mapped[JsonObject | list[JsonObject] | None] = mapped_column(_JSON, default=None)
    optimizer: Mapped[JsonObject | None] = mapped_column(default=None)
    validation_file: Mapped[str | None] = mapped_column(default=None)
    suffix: Mapped[str | None] = mapped_column(default=None)
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", default=None)
    start_from: Mapped[str | None] = mapped_column(default=None)
    finished: Mapped[int | None] = mapped_column(default=None)
    error: Mapped[JsonObject | None] = mapped_column(default=None)
    result_file: Mapped[str | None] = mapped_column(default=None)
    step: Mapped[int] = mapped_column(default=0)
    steps: Mapped[int | None] = mapped_column(default=None)
    trained_tokens: Mapped[int] = mapped_column(default=0)
    pace: Mapped[float | None] = mapped_column(default=None)
    stepped: Mapped[float | None] = mapped_column(default=None)


class Event(Record):
    """Something that happened to a job. `level` is info, warn or error, `type` message or metrics; `data`
    holds the figures of metrics, of which a job has one row for each `step`."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job", "step", name="one_event_a_step"),
        Index("events_of_job", "job", "number"),
    )

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created: Mapped[int]
    level: Mapped[str]
    message: Mapped[str]
    type: Mapped[str] = mapped_column(default="message")
    data: Mapped[JsonObject | None] = mapped_column(default=None)
    step: Mapped[int | None] = mapped_column(default=None)


class CheckpointRecord(Record):
    """A job's adapter after some step, in a folder of its own, as `Adapter.path`. `metrics` are the losses
    then known."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job", "step", name="one_checkpoint_a_step"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    name: Mapped[str] = mapped_column(index=True)
    path: Mapped[Path]
    digest: Mapped[str]
    created: Mapped[int]
    metrics: Mapped[JsonObject]


class QuarantineRecord(Record):
    """Something that brought engines down, and is not tried again. `kind` is request, job, adapter or check,
    and `subject` its id; `details` is what a request asked for."""

    __tablename__ = "quarantine"
    __table_args__ = (UniqueConstraint("kind", "subject", name="one_quarantine_a_subject"),)

    kind: Mapped[str]
    subject: Mapped[str]
    reason: Mapped[str]
    created: Mapped[int]
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), default=None)
    details: Mapped[JsonObject | None] = mapped_column(default=None)


class SuspectRecord(TableRow):
    """A job or an adapter that was there when an engine crashed, and has not gone further since."""

    __tablename__ = "suspects"

    kind: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    crashes: Mapped[int]
    progress: Mapped[int]


class NewsMark(TableRow):
    """A piece of news of an engine (one start of its process), by its `number`; the row is the newest piece
    that is written down."""

    __tablename__ = "news"

    generation: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A stretch of a list; `has_more` says that it goes on after the last record."""

    records: tuple[R, ...]
    has_more: bool
