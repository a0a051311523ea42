"""Tables for work that crashed engines (quarantine), and for work that may have (suspects)."""

from alembic import op
from sqlalchemy import JSON, Column, ForeignKey, Integer, Text, UniqueConstraint

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds both tables, empty."""
    op.create_table(
        "quarantine",
        Column("number", Integer, primary_key=True, autoincrement=True),
        Column("id", Text, nullable=False, unique=True),
        Column("tenant", Text, ForeignKey("tenants.id"), nullable=True),
        Column("kind", Text, nullable=False),
        Column("subject", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("created", Integer, nullable=False),
        Column("details", JSON(none_as_null=True), nullable=True),
        UniqueConstraint("kind", "subject", name="one_quarantine_a_subject"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "suspects",
        Column("kind", Text, primary_key=True),
        Column("subject", Text, primary_key=True),
        Column("crashes", Integer, nullable=False),
        Column("progress", Integer, nullable=False),
    )
