"""Tables for sessions, samplers, training runs and checkpoints of `tinker` clients."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.tables import integers, make_records, objects, reference, texts

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds four tables, empty."""
    make_records(
        "tinker_sessions",
        *(*integers("created"), *texts("display_name", nullable=True), *objects("user_metadata")),
        *(*texts("project", nullable=True), *objects("finished")),
    )
    op.create_index("tinker_sessions_of_tenant", "tinker_sessions", ["tenant", "number"])
    session = reference("session", "tinker_sessions.id")
    make_records("tinker_samplers", session, *texts("model"), *integers("created"))
    op.create_index("ix_tinker_samplers_session", "tinker_samplers", ["session"])
    make_records(
        "tinker_runs",
        *(reference("session", "tinker_sessions.id"), *texts("base"), *objects("lora", nullable=False)),
        *(*integers("created used"), *objects("user_metadata")),
    )
    op.create_index("ix_tinker_runs_session", "tinker_runs", ["session"])
    op.create_index("tinker_runs_of_tenant", "tinker_runs", ["tenant", "number"])
    make_records(
        "tinker_checkpoints",
        *(reference("run", "tinker_runs.id"), *texts("kind name path base")),
        *(*objects("lora", nullable=False), *integers("bytes created")),
        sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("temporary", sa.Boolean, nullable=False, server_default=sa.false()),
        *(*integers("expires", nullable=True), *objects("user_metadata")),
        sa.UniqueConstraint("run", "kind", "name", name="one_tinker_checkpoint_a_name"),
    )
    op.create_index("tinker_checkpoints_of_tenant", "tinker_checkpoints", ["tenant", "number"])
