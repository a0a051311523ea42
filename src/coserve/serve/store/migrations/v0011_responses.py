"""Tables of responses, conversations, their items, and chat completions that are kept."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OWN = "{row}.tenant"
TABLES = {
    "responses": (_OWN, "id tenant status body previous conversation request", False),
    "conversations": (_OWN, "id tenant metadata", False),
    "response_items": (_OWN, "id tenant item response conversation", False),
    "chat_completions": (_OWN, "id tenant model body messages metadata", False),
}


def _record(name: str, *parts: sa.Column[object] | sa.schema.SchemaItem) -> None:
    op.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        *parts,
        sqlite_autoincrement=True,
    )


def _text(name: str, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _created() -> sa.Column[object]:
    return sa.Column("created", sa.Integer, nullable=False)


def upgrade() -> None:
    """Adds four tables, empty."""
    labels = sa.Column("metadata", sa.JSON(none_as_null=True), nullable=False)
    _record(
        "responses", _created(), _text("status"), _text("body"), _text("previous", True),
        _text("conversation", True), _text("request", True),
    )  # fmt: skip
    _record("conversations", _created(), labels)
    _record(
        "response_items", _text("item"), _text("response", True), _text("conversation", True),
        sa.Column("output", sa.Boolean, nullable=False),
    )  # fmt: skip
    _record("chat_completions", _created(), _text("model"), _text("body"), _text("messages"), labels.copy())
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
