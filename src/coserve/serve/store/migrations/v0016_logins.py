"""The table of browsers that are logged in to the page."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Adds the table, empty. Its rows are bounded by the number of keys, so they are not counted as kept."""
    op.create_table(
        "logins",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("key", sa.Text, sa.ForeignKey("keys.id"), nullable=False),
        sa.Column("ends", sa.Integer, nullable=False),
    )
    op.create_index("ix_logins_key", "logins", ["key"])
    op.create_index("ix_logins_ends", "logins", ["ends"])
