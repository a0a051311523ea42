"""Tables for sessions, samplers, training runs and checkpoints of `tinker` clients."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _record(name: str, *parts: sa.Column[object] | sa.schema.SchemaItem) -> None:
    op.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        *parts,
        sqlite_autoincrement=True,
    )


def _json(name: str, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable)


def upgrade() -> None:
    """Adds four tables, empty."""
    _record(
        "tinker_sessions",
        sa.Column("created", sa.Integer, nullable=False),
        sa.Column("display_name", sa.Text, nullable=True),
        _json("user_metadata"),
        sa.Column("project", sa.Text, nullable=True),
        _json("finished"),
    )
    op.create_index("tinker_sessions_of_tenant", "tinker_sessions", ["tenant", "number"])
    _record(
        "tinker_samplers",
        sa.Column("session", sa.Text, sa.ForeignKey("tinker_sessions.id"), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("created", sa.Integer, nullable=False),
    )
    op.create_index("ix_tinker_samplers_session", "tinker_samplers", ["session"])
    _record(
        "tinker_runs",
        sa.Column("session", sa.Text, sa.ForeignKey("tinker_sessions.id"), nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        _json("lora", nullable=False),
        sa.Column("created", sa.Integer, nullable=False),
        sa.Column("used", sa.Integer, nullable=False),
        _json("user_metadata"),
    )
    op.create_index("ix_tinker_runs_session", "tinker_runs", ["session"])
    op.create_index("tinker_runs_of_tenant", "tinker_runs", ["tenant", "number"])
    _record(
        "tinker_checkpoints",
        sa.Column("run", sa.Text, sa.ForeignKey("tinker_runs.id"), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        _json("lora", nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("created", sa.Integer, nullable=False),
        sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("temporary", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("expires", sa.Integer, nullable=True),
        _json("user_metadata"),
        sa.UniqueConstraint("run", "kind", "name", name="one_tinker_checkpoint_a_name"),
    )
    op.create_index("tinker_checkpoints_of_tenant", "tinker_checkpoints", ["tenant", "number"])
