"""Columns for the order of queued jobs, and for jobs that are to end with what they have learnt."""

from alembic import op
from sqlalchemy import Boolean, Column, Integer, false

revision = "0018"
down_revision = "0016"


def upgrade() -> None:
    """Adds `place`, empty (jobs begin in the order of their creation), and `saving`, false."""
    op.add_column("jobs", Column("place", Integer, nullable=True))
    op.add_column("jobs", Column("saving", Boolean, nullable=False, server_default=false()))
