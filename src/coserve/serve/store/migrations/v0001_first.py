"""The first schema."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes every table, and the tenant of requests without keys."""
    op.create_table(
        "news",
        sa.Column("generation", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("generation"),
    )
    tenants = op.create_table(
        "tenants",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "files",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("suffix", sa.Text(), nullable=False),
        sa.Column("examples", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("files_of_tenant", "files", ["tenant", "number"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("training_file", sa.Text(), nullable=False),
        sa.Column("validation_file", sa.Text(), nullable=True),
        sa.Column("seed", sa.Integer(), nullable=False),
        sa.Column("every", sa.Integer(), nullable=False),
        sa.Column("hyperparameters", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("options", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("lora", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("peft", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("optimizer", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("suffix", sa.Text(), nullable=True),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("start_from", sa.Text(), nullable=True),
        sa.Column("finished", sa.Integer(), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("result_file", sa.Text(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=True),
        sa.Column("trained_tokens", sa.Integer(), nullable=False),
        sa.Column("pace", sa.Float(), nullable=True),
        sa.Column("stepped", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_jobs_status"), "jobs", ["status"], unique=False)
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "number"], unique=False)
    op.create_table(
        "keys",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("revoked", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("digest"),
        sa.UniqueConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_keys_prefix"), "keys", ["prefix"], unique=False)
    op.create_table(
        "adapters",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("base", sa.Text(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=True),
        sa.Column("job", sa.Text(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenants.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("tenant", "name", name="one_adapter_a_name"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_adapters_name"), "adapters", ["name"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("job", "step", name="one_checkpoint_a_step"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_checkpoints_name"), "checkpoints", ["name"], unique=False)
    op.create_table(
        "events",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("created", sa.Integer(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job"],
            ["jobs.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("job", "step", name="one_event_a_step"),
        sqlite_autoincrement=True,
    )
    op.create_index("events_of_job", "events", ["job", "number"], unique=False)
    op.bulk_insert(tenants, [{"id": "local", "name": "local", "weight": 1.0, "created": int(time.time())}])
