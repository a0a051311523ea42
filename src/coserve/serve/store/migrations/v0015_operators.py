"""Tables for operators: usage by hour, and the audit log."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.tables import integers, make_records, texts

revision = "0015"
down_revision = "0013"


def upgrade() -> None:
    """Adds two tables and a mark, empty. A trigger refuses changes of the audit log."""
    op.create_table(
        "usage",
        sa.Column("hour", sa.Integer, primary_key=True),
        *(sa.Column(name, sa.Text, primary_key=True) for name in ("tenant", "key", "model", "version")),
        *integers("requests input_tokens cached_tokens output_tokens trained_tokens kept_bytes"),
    )
    op.create_index("usage_of_tenant", "usage", ["tenant", "hour"])
    journal = sa.Column("journal", sa.Text, primary_key=True)
    op.create_table("usage_merged", journal, *integers("segment"))
    columns = "actor action subject tenant key address request_id details"
    make_records("audit", *integers("time"), *texts(columns), owned=False)
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
