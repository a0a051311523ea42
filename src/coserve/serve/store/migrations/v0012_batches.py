"""The tables of batches, and of uploads in parts."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_TEXTS = "id tenant status endpoint input_file metadata output_file error_file errors"
TABLES = {
    "batches": ("{row}.tenant", _TEXTS, False),
    "uploads": ("{row}.tenant", "id tenant status filename purpose file", True),
}


def upgrade() -> None:
    """Adds the tables, empty."""
    times = ("began", "cancelling", "finalizing", "ended")
    op.create_table(
        "batches",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("status", "endpoint", "input_file")),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("created", "window")),
        sa.Column("life", sa.Integer, nullable=True),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        *(sa.Column(name, sa.Integer, nullable=True) for name in times),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("total", "completed", "failed")),
        *(sa.Column(name, sa.Text, nullable=True) for name in ("output_file", "error_file")),
        sa.Column("errors", sa.JSON(none_as_null=True), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_index("batches_of_tenant", "batches", ["tenant", "number"])
    op.create_table(
        "uploads",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("status", "filename", "purpose")),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("size", "bytes", "created", "expires")),
        sa.Column("life", sa.Integer, nullable=True),
        sa.Column("file", sa.Text, nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_uploads_expires", "uploads", ["expires"])
    op.create_index("uploads_of_tenant", "uploads", ["tenant", "number"])
    for table, counted in TABLES.items():
        count_rows(table, *counted)
