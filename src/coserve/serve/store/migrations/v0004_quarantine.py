"""Tables for work that crashed engines (quarantine), and for work that may have (suspects)."""

from alembic import op
from sqlalchemy import Column, Text, UniqueConstraint

from coserve.serve.store.tables import integers, make_records, objects, reference, texts

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds both tables, empty."""
    make_records(
        "quarantine",
        reference("tenant", "tenants.id", nullable=True),
        *(*texts("kind subject reason"), *integers("created"), *objects("details")),
        UniqueConstraint("kind", "subject", name="one_quarantine_a_subject"),
        owned=False,
    )
    key = (Column(name, Text, primary_key=True) for name in ("kind", "subject"))
    op.create_table("suspects", *key, *integers("crashes progress"))
