"""The first schema."""

import time

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.tables import integers, make_records, objects, reference, texts

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes every table, and the tenant of requests without keys."""
    op.create_table("news", sa.Column("generation", sa.Text, primary_key=True), *integers("number"))
    tenants = make_records(
        "tenants",
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("weight", sa.Float, nullable=False),
        *integers("created"),
        owned=False,
    )
    make_records(
        "files",
        *(*texts("filename purpose"), *integers("bytes created"), *texts("suffix")),
        *integers("examples", nullable=True),
    )
    op.create_index("files_of_tenant", "files", ["tenant", "number"])
    make_records(
        "jobs",
        *(*texts("status model name base"), *integers("created"), *texts("training_file")),
        *(*texts("validation_file", nullable=True), *integers("seed every")),
        *(*objects("hyperparameters options lora", nullable=False), *objects("peft optimizer")),
        *(*texts("suffix", nullable=True), *objects("metadata"), *texts("start_from", nullable=True)),
        *(*integers("finished", nullable=True), *objects("error"), *texts("result_file", nullable=True)),
        *(*integers("step"), *integers("steps", nullable=True), *integers("trained_tokens")),
        *(sa.Column(name, sa.Float, nullable=True) for name in ("pace", "stepped")),
    )
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "number"])
    make_records(
        "keys",
        *texts("prefix"),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        *(*integers("created"), *integers("revoked", nullable=True)),
    )
    op.create_index("ix_keys_prefix", "keys", ["prefix"])
    make_records(
        "adapters",
        reference("tenant", "tenants.id", nullable=True),
        *(*texts("name path base"), *integers("created"), *texts("parent", nullable=True)),
        *(reference("job", "jobs.id", nullable=True), *integers("step", nullable=True)),
        sa.UniqueConstraint("tenant", "name", name="one_adapter_a_name"),
        owned=False,
    )
    op.create_index("ix_adapters_name", "adapters", ["name"])
    make_records(
        "checkpoints",
        *(reference("job", "jobs.id"), *integers("step"), *texts("name path digest"), *integers("created")),
        *objects("metrics", nullable=False),
        sa.UniqueConstraint("job", "step", name="one_checkpoint_a_step"),
        owned=False,
    )
    op.create_index("ix_checkpoints_name", "checkpoints", ["name"])
    make_records(
        "events",
        *(reference("job", "jobs.id"), *integers("created"), *texts("level message type"), *objects("data")),
        *integers("step", nullable=True),
        sa.UniqueConstraint("job", "step", name="one_event_a_step"),
        owned=False,
    )
    op.create_index("events_of_job", "events", ["job", "number"])
    op.bulk_insert(tenants, [{"id": "local", "name": "local", "weight": 1.0, "created": int(time.time())}])
