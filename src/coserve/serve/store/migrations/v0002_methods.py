"""Adapters of any method: what was asked for is what the engine gets."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drops the copy of a job's settings in the words of the only method there was."""
    op.drop_column("jobs", "lora")
