"""The table of what requests with an `Idempotency-Key` have created."""

from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows
from coserve.serve.store.tables import integers, make_records, texts

revision = "0007"
down_revision = "0006"

TABLES = {"creations": ("{row}.tenant", "id tenant request location content_type reply", False)}


def upgrade() -> None:
    """Adds the table, empty."""
    make_records(
        "creations",
        *(*integers("created"), *texts("request location"), *integers("status")),
        *texts("content_type reply", nullable=True),
    )
    op.create_index("ix_creations_created", "creations", ["created"])
    op.create_index("creations_of_tenant", "creations", ["tenant", "number"])
    for table, counted in TABLES.items():
        count_rows(table, *counted)
