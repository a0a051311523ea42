"""Columns for what became of a job's examples."""

from alembic import op
from sqlalchemy import Column, Integer

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Adds four columns to `jobs`, empty: numbers, which the triggers of `kept` need not know."""
    for name in ("examples", "truncated", "skipped", "dropped"):
        op.add_column("jobs", Column(name, Integer, nullable=True))
