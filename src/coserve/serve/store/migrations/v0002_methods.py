"""Adapters of any method: the engine gets a job's settings as requested."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Drops the copy of a job's settings in terms of the first method."""
    op.drop_column("jobs", "lora")
