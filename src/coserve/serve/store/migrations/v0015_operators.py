"""Tables for operators: usage by hour, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds two tables and a mark, empty. A trigger refuses changes of the audit log."""
    op.create_table(
        "usage",
        *(sa.Column("hour", sa.Integer, primary_key=True), _key("tenant"), _key("key"), _key("model")),
        *(_key("version"), _count("requests"), _count("input_tokens"), _count("cached_tokens")),
        *(_count("output_tokens"), _count("trained_tokens"), _count("kept_bytes")),
    )
    op.create_index("usage_of_tenant", "usage", ["tenant", "hour"])
    op.create_table("usage_merged", sa.Column("journal", sa.Text, primary_key=True), _count("segment"))
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *(_count("time"), _text("actor"), _text("action"), _text("subject"), _text("tenant")),
        *(_text("key"), _text("address"), _text("request_id"), _text("details")),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_of_tenant", "audit", ["tenant", "number"])
    op.create_index("ix_audit_time", "audit", ["time"])
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_is_append_only BEFORE UPDATE ON audit "
            "FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()"
        )
        return
    op.execute(
        "CREATE TRIGGER audit_is_append_only BEFORE UPDATE ON audit "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
    )


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, primary_key=True)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False)
