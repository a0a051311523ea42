"""The tables. `number` is the order in which rows came, which lists are sorted by; `id` is what callers see.

Changing anything here needs a migration beside it; a test compares the two.
"""

from typing import Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata: Final = MetaData()


def _number() -> Column[int]:
    return Column("number", Integer, primary_key=True, autoincrement=True)


def _id() -> Column[str]:
    return Column("id", Text, nullable=False, unique=True)


def _created() -> Column[int]:
    return Column("created", Integer, nullable=False)


def _json(name: str, nullable: bool = True) -> Column[Any]:
    return Column(name, JSON(none_as_null=True), nullable=nullable)


def _owner(nullable: bool = False) -> Column[str]:
    return Column("tenant", ForeignKey("tenants.id"), nullable=nullable)


def _job(nullable: bool = False) -> Column[str]:
    return Column("job", ForeignKey("jobs.id"), nullable=nullable)


tenants: Final = Table(
    "tenants",
    metadata,
    _number(),
    _id(),
    Column("name", Text, nullable=False, unique=True),
    Column("weight", Float, nullable=False),
    _created(),
    sqlite_autoincrement=True,
)

keys: Final = Table(
    "keys",
    metadata,
    _number(),
    _id(),
    _owner(),
    Column("prefix", Text, nullable=False, index=True),
    Column("digest", LargeBinary, nullable=False, unique=True),
    _created(),
    Column("revoked", Integer),
    sqlite_autoincrement=True,
)

files: Final = Table(
    "files",
    metadata,
    _number(),
    _id(),
    _owner(),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", Integer, nullable=False),
    _created(),
    Column("suffix", Text, nullable=False),
    Column("examples", Integer),
    Index("files_of_tenant", "tenant", "number"),
    sqlite_autoincrement=True,
)

jobs: Final = Table(
    "jobs",
    metadata,
    _number(),
    _id(),
    _owner(),
    Column("status", Text, nullable=False, index=True),
    Column("model", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("base", Text, nullable=False),
    _created(),
    # Files may be deleted once the job is over, and the job still names them: no foreign key.
    Column("training_file", Text, nullable=False),
    Column("validation_file", Text),
    Column("seed", Integer, nullable=False),
    Column("every", Integer, nullable=False),
    _json("hyperparameters", nullable=False),
    _json("options", nullable=False),
    _json("peft"),
    _json("optimizer"),
    Column("suffix", Text),
    _json("metadata"),
    Column("start_from", Text),  # an adapter, which may be deleted later too
    Column("finished", Integer),
    _json("error"),
    Column("result_file", Text),
    Column("step", Integer, nullable=False),
    Column("steps", Integer),
    Column("trained_tokens", Integer, nullable=False),
    Column("pace", Float),
    Column("stepped", Float),
    Index("jobs_of_tenant", "tenant", "number"),
    sqlite_autoincrement=True,
)

events: Final = Table(
    "events",
    metadata,
    _number(),
    _id(),
    _job(),
    _created(),
    Column("level", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("type", Text, nullable=False),
    _json("data"),
    Column("step", Integer),  # of metrics: a job has one row of them for each step
    UniqueConstraint("job", "step", name="one_event_a_step"),
    Index("events_of_job", "job", "number"),
    sqlite_autoincrement=True,
)

checkpoints: Final = Table(
    "checkpoints",
    metadata,
    _number(),
    _id(),
    _job(),
    Column("step", Integer, nullable=False),
    Column("name", Text, nullable=False, index=True),
    Column("path", Text, nullable=False),
    Column("digest", Text, nullable=False),
    _created(),
    _json("metrics", nullable=False),
    UniqueConstraint("job", "step", name="one_checkpoint_a_step"),
    sqlite_autoincrement=True,
)

adapters: Final = Table(
    "adapters",
    metadata,
    _number(),
    _id(),
    _owner(nullable=True),
    Column("name", Text, nullable=False, index=True),
    Column("path", Text, nullable=False),
    Column("base", Text, nullable=False),
    _created(),
    Column("parent", Text),
    _job(nullable=True),
    Column("step", Integer),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("tenant", "name", name="one_adapter_a_name"),
    sqlite_autoincrement=True,
)

# What brought engines down, and is not tried again. A request's subject is its own id, and what it asked for
# is in `details`.
quarantine: Final = Table(
    "quarantine",
    metadata,
    _number(),
    _id(),
    _owner(nullable=True),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("reason", Text, nullable=False),
    _created(),
    _json("details"),
    UniqueConstraint("kind", "subject", name="one_quarantine_a_subject"),
    sqlite_autoincrement=True,
)

# Jobs and adapters that were there when an engine crashed, and have not gone further since.
suspects: Final = Table(
    "suspects",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("crashes", Integer, nullable=False),
    Column("progress", Integer, nullable=False),
)

# How far the news of each engine (one start of its process) have been written down.
news: Final = Table(
    "news",
    metadata,
    Column("generation", Text, primary_key=True),
    Column("number", Integer, nullable=False),
)
