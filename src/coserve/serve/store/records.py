"""The tables; rows are objects, detached once their transaction has ended.

Any change here needs a migration; a test compares the two.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, declared_attr, mapped_column, registry

from coserve.core.job_status import JobStatus

R = TypeVar("R")
JsonObject = dict[str, Any]
_JSON = JSON(none_as_null=True)


class _AsText(TypeDecorator[Any]):
    """A text column for a type constructed from its text."""

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
            int: BigInteger().with_variant(Integer(), "sqlite"),  # where it has 64 bits, too
            float: Float,
            Path: _AsText(Path),
            JobStatus: _AsText(JobStatus),
            JsonObject: _JSON,
            dict[str, str]: _JSON,
        }
    )


class Record(TableRow):
    """A row with a public `id`. `number` is the order of insertion, the sort key of lists, and is never
    reused."""

    __abstract__ = True
    number: Mapped[int] = mapped_column(primary_key=True, init=False, repr=False, compare=False)
    id: Mapped[str] = mapped_column(unique=True)

    def as_dict(self) -> JsonObject:
        """All fields by name, as JSON types."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init}


class OwnedRecord(Record):
    """A record of a tenant."""

    __abstract__ = True
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"))


class ListedRecord(OwnedRecord):
    """One of those that a tenant has listed in the order of their numbers."""

    __abstract__ = True

    @declared_attr.directive
    def __table_args__(cls) -> tuple[Any, ...]:
        return (Index(f"{cls.__tablename__}_of_tenant", "tenant", "number"),)


class Tenant(Record):
    """An owner of keys, files, jobs and adapters. Its share of the machine is `weight` over the sum of all
    active tenants'."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(unique=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    created: Mapped[int] = mapped_column(default=0, compare=False)


class KeyRecord(OwnedRecord):
    """An API key, stored as its digest."""

    __tablename__ = "keys"

    prefix: Mapped[str] = mapped_column(index=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    created: Mapped[int]
    revoked: Mapped[int | None] = mapped_column(default=None)


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without its digest, and its tenant's name."""

    id: str
    tenant: str
    prefix: str
    created: int
    revoked: int | None = None


class File(ListedRecord):
    """An uploaded or a result file with its bytes at `Store.file_path`. `suffix` is that of the file on disk
    (`jobs.containers.SUFFIXES`), `examples` their number in training data, and `details` a sentence about
    what was found in these. `expires` is None for never."""

    __tablename__ = "files"

    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int]
    created: Mapped[int]
    suffix: Mapped[str]
    examples: Mapped[int | None] = mapped_column(default=None)
    expires: Mapped[int | None] = mapped_column(default=None, index=True)
    details: Mapped[str | None] = mapped_column(default=None)


class Adapter(Record):
    """A version that requests can name. `id` is its key in engines.

    A `path` within the state folder is relative to it, so that the folder can be moved (`Store.folder_of`).
    `tenant` is None for adapters of the server's settings, shared with all. `parent` is the name of the
    adapter that training began with. `step` is set for a checkpoint of `job`, which is not listed among
    models. A `pinned` one stays in the engine's memory.
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
    bytes: Mapped[int] = mapped_column(default=0, server_default="0")


class JobRecord(ListedRecord):
    """A fine-tuning job.

    `options` and `peft` are passed to the engine unchanged. `name` is the adapter's once there is one,
    `start_from` the id of the adapter that training begins with. There are no foreign keys, as files and that
    adapter may be deleted once the job is over. `pace` is seconds per optimizer step, and `stepped` when the
    last one ended. Of its `examples` (None before it starts) some were `truncated`; others were `skipped` as
    too long, or `dropped` with nothing to learn. Queued jobs begin in the order of `place`, which is `number`
    where it is None. A paused one that is `saving` succeeds with its checkpoint.
    """

    __tablename__ = "jobs"

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
    examples: Mapped[int | None] = mapped_column(default=None)
    truncated: Mapped[int | None] = mapped_column(default=None)
    skipped: Mapped[int | None] = mapped_column(default=None)
    dropped: Mapped[int | None] = mapped_column(default=None)
    integrations: Mapped[list[JsonObject] | None] = mapped_column(_JSON, default=None)
    place: Mapped[int | None] = mapped_column(default=None)
    saving: Mapped[bool] = mapped_column(default=False, server_default=false())


class Event(Record):
    """An event of a job. `level` is info, warn or error, `type` message or metrics; `data` holds the figures
    of metrics, of which a job has one row for each `step`."""

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
    known at that step."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job", "step", name="one_checkpoint_a_step"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    name: Mapped[str] = mapped_column(index=True)
    path: Mapped[Path]
    digest: Mapped[str]
    created: Mapped[int]
    metrics: Mapped[JsonObject]
    bytes: Mapped[int] = mapped_column(default=0, server_default="0")


class CheckpointPermission(OwnedRecord):
    """Says that the tenant `project` may use the tenant's checkpoint of this name."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (
        UniqueConstraint("tenant", "checkpoint", "project", name="one_permission_a_project"),
        Index("permissions_of_project", "project", "checkpoint"),
    )

    checkpoint: Mapped[str]
    project: Mapped[str]
    created: Mapped[int]


class EvalRecord(ListedRecord):
    """An eval: the form of its data (`source`) and its graders (`criteria`), as they were asked for."""

    __tablename__ = "evals"

    name: Mapped[str]
    created: Mapped[int]
    source: Mapped[JsonObject]
    criteria: Mapped[list[JsonObject]] = mapped_column(_JSON)
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", default=None)


class EvalRunRecord(OwnedRecord):
    """A run of an eval over the data of `source`. `status` is queued, in_progress, completed, canceled or
    failed (with an `error`); `tally` counts outcomes."""

    __tablename__ = "eval_runs"
    __table_args__ = (Index("runs_of_eval", "eval", "number"),)

    eval: Mapped[str] = mapped_column(ForeignKey("evals.id"))
    name: Mapped[str]
    created: Mapped[int]
    status: Mapped[str] = mapped_column(index=True)
    source: Mapped[JsonObject]
    tally: Mapped[JsonObject]
    model: Mapped[str | None] = mapped_column(default=None)
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", default=None)
    error: Mapped[JsonObject | None] = mapped_column(default=None)


class EvalItemRecord(OwnedRecord):
    """The outcome of a run for the item at a `place` of its data: the `sample` that was graded and the
    `results` by criterion. `status` is pass, fail or error."""

    __tablename__ = "eval_items"
    __table_args__ = (
        UniqueConstraint("run", "place", name="one_eval_item_a_place"),
        Index("items_of_run", "run", "number"),
    )

    run: Mapped[str] = mapped_column(ForeignKey("eval_runs.id"))
    place: Mapped[int]
    created: Mapped[int]
    status: Mapped[str]
    item: Mapped[JsonObject]
    results: Mapped[list[JsonObject]] = mapped_column(_JSON)
    sample: Mapped[JsonObject | None] = mapped_column(default=None)


class QuarantineRecord(Record):
    """Work that crashed engines and is not retried. `kind` is request, job, session, adapter or check, and
    `subject` its id; `details` are a request's contents."""

    __tablename__ = "quarantine"
    __table_args__ = (UniqueConstraint("kind", "subject", name="one_quarantine_a_subject"),)

    kind: Mapped[str]
    subject: Mapped[str]
    reason: Mapped[str]
    created: Mapped[int]
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"), default=None)
    details: Mapped[JsonObject | None] = mapped_column(default=None)


class SuspectRecord(TableRow):
    """A job or an adapter present when an engine of the server `owner` crashed, without progress since."""

    __tablename__ = "suspects"

    owner: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    crashes: Mapped[int]
    progress: Mapped[int]


class TinkerSession(ListedRecord):
    """A session of a `tinker` client. `finished` is the reason that its client gave at the end, with a
    detail."""

    __tablename__ = "tinker_sessions"

    created: Mapped[int]
    display_name: Mapped[str | None] = mapped_column(default=None)
    user_metadata: Mapped[JsonObject | None] = mapped_column(default=None)
    project: Mapped[str | None] = mapped_column(default=None)
    finished: Mapped[JsonObject | None] = mapped_column(default=None)


class TinkerSampler(OwnedRecord):
    """A sampling session: what one sampling client samples from. `model` is a name as in `Catalog.find`: the
    base, an adapter or a checkpoint's path."""

    __tablename__ = "tinker_samplers"

    session: Mapped[str] = mapped_column(ForeignKey("tinker_sessions.id"), index=True)
    model: Mapped[str]
    created: Mapped[int]


class TinkerRun(ListedRecord):
    """A training run: one LoRA adapter that a client trains. `lora` are its rank, its seed and the modules it
    is on, `used` the time of the last request."""

    __tablename__ = "tinker_runs"

    session: Mapped[str] = mapped_column(ForeignKey("tinker_sessions.id"), index=True)
    base: Mapped[str]
    lora: Mapped[JsonObject]
    created: Mapped[int]
    used: Mapped[int]
    user_metadata: Mapped[JsonObject | None] = mapped_column(default=None)


class TinkerCheckpoint(OwnedRecord):
    """Saved weights of a run, in a folder of their own, as `Adapter.path`; immutable. `id` is their key in
    engines.

    `kind` is the second part of `tinker://RUN/KIND/NAME`: weights (with the optimizer's state),
    sampler_weights or external_weights. A `temporary` one is deleted with its session. `expires` is None for
    never.
    """

    __tablename__ = "tinker_checkpoints"
    __table_args__ = (
        UniqueConstraint("run", "kind", "name", name="one_tinker_checkpoint_a_name"),
        Index("tinker_checkpoints_of_tenant", "tenant", "number"),
    )

    run: Mapped[str] = mapped_column(ForeignKey("tinker_runs.id"))
    kind: Mapped[str]
    name: Mapped[str]
    path: Mapped[Path]
    base: Mapped[str]
    lora: Mapped[JsonObject]
    bytes: Mapped[int]
    created: Mapped[int]
    public: Mapped[bool] = mapped_column(default=False, server_default=false())
    temporary: Mapped[bool] = mapped_column(default=False, server_default=false())
    expires: Mapped[int | None] = mapped_column(default=None)
    user_metadata: Mapped[JsonObject | None] = mapped_column(default=None)

    @property
    def checkpoint_id(self) -> str:
        """Its name within the run, as `sampler_weights/step-3`."""
        return f"{self.kind}/{self.name}"

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.run}/{self.checkpoint_id}"


class BatchRecord(ListedRecord):
    """A batch of requests, the lines of an input file. Its folder has that file and the results so far, of
    which files of the tenant's are made at its end. `status` and times are OpenAI's; `window` and `life` (of
    its results, None for ever) are seconds."""

    __tablename__ = "batches"

    status: Mapped[str] = mapped_column(index=True)
    endpoint: Mapped[str]
    input_file: Mapped[str]
    created: Mapped[int]
    window: Mapped[int]
    life: Mapped[int | None] = mapped_column(default=None)
    labels: Mapped[dict[str, str] | None] = mapped_column("metadata", default=None)
    began: Mapped[int | None] = mapped_column(default=None)
    cancelling: Mapped[int | None] = mapped_column(default=None)
    finalizing: Mapped[int | None] = mapped_column(default=None)
    ended: Mapped[int | None] = mapped_column(default=None)
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    output_file: Mapped[str | None] = mapped_column(default=None)
    error_file: Mapped[str | None] = mapped_column(default=None)
    errors: Mapped[JsonObject | None] = mapped_column(default=None)

    @property
    def expires(self) -> int:
        """The time at which it is ended at the latest."""
        return self.created + self.window


class UploadRecord(ListedRecord):
    """A file that comes in parts, which are in a folder of its own until it is completed. `bytes` count as
    kept: all of its `size` while it is pending. `life` is that of its `file`, in seconds; None for ever."""

    __tablename__ = "uploads"

    status: Mapped[str]
    filename: Mapped[str]
    purpose: Mapped[str]
    size: Mapped[int]
    bytes: Mapped[int]
    created: Mapped[int]
    expires: Mapped[int] = mapped_column(index=True)
    life: Mapped[int | None] = mapped_column(default=None)
    file: Mapped[str | None] = mapped_column(default=None)


class Creation(ListedRecord):
    """The creation of a request with an `Idempotency-Key`, and its reply. `id` is a digest of tenant and key,
    `request` one of what was asked for. Without a `reply`, as one that is too large or was lost with the
    server, what GET answers at `location` stands for it."""

    __tablename__ = "creations"

    created: Mapped[int] = mapped_column(index=True)
    request: Mapped[str]
    location: Mapped[str]
    status: Mapped[int] = mapped_column(default=200)
    content_type: Mapped[str | None] = mapped_column(default=None)
    reply: Mapped[str | None] = mapped_column(default=None)


class ResponseRecord(OwnedRecord):
    """A response. `body` is its JSON, and `previous` the id of the one that it goes on with. `request` is
    the JSON of the body that asked for it, without its items, of one that is under way in the background."""

    __tablename__ = "responses"

    created: Mapped[int] = mapped_column(index=True)
    status: Mapped[str] = mapped_column(index=True)
    body: Mapped[str]
    previous: Mapped[str | None] = mapped_column(default=None, index=True)
    conversation: Mapped[str | None] = mapped_column(default=None)
    request: Mapped[str | None] = mapped_column(default=None)


class ConversationRecord(OwnedRecord):
    """A conversation, which is a list of items."""

    __tablename__ = "conversations"

    created: Mapped[int]
    labels: Mapped[dict[str, str]] = mapped_column("metadata")


class ItemRecord(OwnedRecord):
    """An item (`item` is its JSON) of a response, whose request it is of unless it is `output`, or of a
    conversation, or of both."""

    __tablename__ = "response_items"

    item: Mapped[str]
    response: Mapped[str | None] = mapped_column(index=True)
    conversation: Mapped[str | None] = mapped_column(index=True)
    output: Mapped[bool]


class StoredChat(ListedRecord):
    """A chat completion that is kept: `body` and `messages` are the JSON of the reply and of the request's
    messages."""

    __tablename__ = "chat_completions"

    created: Mapped[int] = mapped_column(index=True)
    model: Mapped[str]
    body: Mapped[str]
    messages: Mapped[str]
    labels: Mapped[dict[str, str]] = mapped_column("metadata")


class LoginRecord(TableRow):
    """A browser that has logged in to the page with an API key, and is logged in until `ends` or until the
    key is revoked. Its cookie is stored as a digest."""

    __tablename__ = "logins"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(ForeignKey("keys.id"), index=True)
    ends: Mapped[int] = mapped_column(index=True)


class TenantRows(TableRow):
    """Rows of one table that the server keeps of a tenant, and the bytes of these with their files. Triggers
    of the database change it, and nothing else."""

    __tablename__ = "kept"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    rows: Mapped[int]
    bytes: Mapped[int]


class UsageRecord(TableRow):
    """Usage of one tenant in one hour (Unix seconds of its start), by one key (its prefix) and version of a
    model; texts are empty where there is none. `kept_bytes` is the most that was kept of the tenant in the
    hour, in a row of its own."""

    __tablename__ = "usage"
    __table_args__ = (Index("usage_of_tenant", "tenant", "hour"),)

    hour: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    trained_tokens: Mapped[int]
    kept_bytes: Mapped[int]


class MergedSegment(TableRow):
    """The number of the last segment of a usage journal whose lines are in the table of usage."""

    __tablename__ = "usage_merged"

    journal: Mapped[str] = mapped_column(primary_key=True)
    segment: Mapped[int]


class AuditRecord(Record):
    """Something that was done to a `subject` of a `tenant` (its id; empty for the server's own): who did it,
    with which key (its prefix), from where and in which request. Rows are never changed."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_of_tenant", "tenant", "number"),)

    time: Mapped[int] = mapped_column(index=True)
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    tenant: Mapped[str]
    key: Mapped[str]
    address: Mapped[str]
    request_id: Mapped[str]
    details: Mapped[str]


class NewsMark(TableRow):
    """The `number` of the newest stored event of an engine generation (one start of its process, of the
    server `owner`)."""

    __tablename__ = "news"

    generation: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]
    owner: Mapped[str] = mapped_column(default="", server_default="")


class LeaseRecord(TableRow):
    """Says which server does a piece of work: see `leases.py`."""

    __tablename__ = "leases"

    kind: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    fence: Mapped[int]
    expires: Mapped[float]


class TinkerRequest(TableRow):
    """A part of a request that a training run has accepted, as it was sent, by its number: see `run_log.py`.
    Part 0 is written last, and has the outcome. `bytes` are those of `data`."""

    __tablename__ = "tinker_requests"

    run: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    encoding: Mapped[str]
    data: Mapped[bytes]
    tenant: Mapped[str] = mapped_column(default="", server_default="")
    bytes: Mapped[int] = mapped_column(default=0, server_default="0")
    outcome: Mapped[JsonObject | None] = mapped_column(default=None)


class TinkerState(TableRow):
    """A state of a training run after a request, in a folder of its own as `Adapter.path`; without the state
    of an `optimizer` that begins anew."""

    __tablename__ = "tinker_states"

    run: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    path: Mapped[Path]
    optimizer: Mapped[bool]
    tenant: Mapped[str] = mapped_column(default="", server_default="")
    bytes: Mapped[int] = mapped_column(default=0, server_default="0")


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """A page of a list; `has_more` tells whether records follow."""

    records: tuple[R, ...]
    has_more: bool
