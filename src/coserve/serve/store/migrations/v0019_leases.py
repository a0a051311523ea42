"""Leases of work, and marks and suspects of several servers; in PostgreSQL, numbers of 64 bits."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Adds the table of leases, empty, and the owners of marks and suspects, which nobody owns yet."""
    op.create_table(
        "leases",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("subject", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
    )
    op.create_index("ix_leases_owner", "leases", ["owner"])
    op.add_column("news", sa.Column("owner", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "suspects_of_servers",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("subject", sa.Text, primary_key=True),
        sa.Column("crashes", sa.Integer, nullable=False),
        sa.Column("progress", sa.Integer, nullable=False),
    )
    op.execute(
        "INSERT INTO suspects_of_servers (owner, kind, subject, crashes, progress) "
        "SELECT '', kind, subject, crashes, progress FROM suspects"
    )
    op.drop_table("suspects")
    op.rename_table("suspects_of_servers", "suspects")
    if op.get_context().dialect.name == "postgresql":
        _widen()


def _widen() -> None:
    """SQLite's numbers have 64 bits already."""
    found = sa.inspect(op.get_bind())
    for table in found.get_table_names():
        narrow = [one["name"] for one in found.get_columns(table) if isinstance(one["type"], sa.Integer)]
        if narrow:
            changes = ", ".join(f'ALTER COLUMN "{name}" TYPE BIGINT' for name in narrow)
            op.execute(f"ALTER TABLE {table} {changes}")
        if "number" in narrow and table != "news":
            op.execute(f"ALTER SEQUENCE {table}_number_seq AS BIGINT")
