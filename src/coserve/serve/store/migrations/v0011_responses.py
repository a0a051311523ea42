"""Tables of responses, conversations, their items, and chat completions that are kept."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows
from coserve.serve.store.tables import integers, make_records, objects, texts

revision = "0011"
down_revision = "0010"

_OWN = "{row}.tenant"
TABLES = {
    "responses": (_OWN, "id tenant status body previous conversation request", False),
    "conversations": (_OWN, "id tenant metadata", False),
    "response_items": (_OWN, "id tenant item response conversation", False),
    "chat_completions": (_OWN, "id tenant model body messages metadata", False),
}


def upgrade() -> None:
    """Adds four tables, empty."""
    more = texts("previous conversation request", nullable=True)
    make_records("responses", *integers("created"), *texts("status body"), *more)
    make_records("conversations", *integers("created"), *objects("metadata", nullable=False))
    output = sa.Column("output", sa.Boolean, nullable=False)
    make_records("response_items", *texts("item"), *texts("response conversation", nullable=True), output)
    kept = *texts("model body messages"), *objects("metadata", nullable=False)
    make_records("chat_completions", *integers("created"), *kept)
    for table, columns in (
        ("responses", ("created", "previous", "status")),
        ("response_items", ("conversation", "response")),
        ("chat_completions", ("created",)),
    ):
        for column in columns:
            op.create_index(f"ix_{table}_{column}", table, [column])
    op.create_index("chat_completions_of_tenant", "chat_completions", ["tenant", "number"])
    for table, counted in TABLES.items():
        count_rows(table, *counted)
