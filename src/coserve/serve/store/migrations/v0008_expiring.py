"""Files that expire."""

from alembic import op
from sqlalchemy import Column, Integer

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Adds the column `expires`; files that exist already never do."""
    op.add_column("files", Column("expires", Integer, nullable=True))
    op.create_index("ix_files_expires", "files", ["expires"])
