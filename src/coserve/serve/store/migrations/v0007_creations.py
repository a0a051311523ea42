"""The table of what requests with an `Idempotency-Key` have created."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = {"creations": ("{row}.tenant", "id tenant request location content_type reply", False)}


def upgrade() -> None:
    """Adds the table, empty."""
    op.create_table(
        "creations",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("created", sa.Integer, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("location", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("content_type", sa.Text, nullable=True),
        sa.Column("reply", sa.Text, nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_creations_created", "creations", ["created"])
    op.create_index("creations_of_tenant", "creations", ["tenant", "number"])
    for table, counted in TABLES.items():
        count_rows(table, *counted)
