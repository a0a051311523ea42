"""Tables for what training runs of `tinker` clients have accepted, and for their states."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0019"
_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # where it has 64 bits, too


def upgrade() -> None:
    """Adds two tables, empty."""
    op.create_table(
        "tinker_requests",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("number", _BIG, primary_key=True, autoincrement=False),
        sa.Column("part", _BIG, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("encoding", sa.Text, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("outcome", sa.JSON(none_as_null=True), nullable=True),
    )
    op.create_table(
        "tinker_states",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("number", _BIG, primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("optimizer", sa.Boolean, nullable=False),
    )
