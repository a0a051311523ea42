"""Adapters that stay in the engine's memory."""

from alembic import op
from sqlalchemy import Boolean, Column, false

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the column `pinned`; adapters that exist already are not pinned."""
    op.add_column("adapters", Column("pinned", Boolean, nullable=False, server_default=false()))
