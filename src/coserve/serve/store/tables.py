"""Tables and columns as migrations make them."""

import sqlalchemy as sa
from alembic import op


def make_records(name: str, *parts: sa.schema.SchemaItem, owned: bool = True) -> sa.Table:
    """Makes a table of records: with numbers that are never used again, ids, and their tenants if they are
    `owned`; in a table that has owners for some of its rows, the column is among the `parts`."""
    owner = [sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False)] if owned else []
    return op.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        *owner,
        *parts,
        sqlite_autoincrement=True,
    )


def texts(names: str, nullable: bool = False) -> list[sa.schema.SchemaItem]:
    """Columns of text with these names."""
    return [sa.Column(name, sa.Text, nullable=nullable) for name in names.split()]


def integers(names: str, nullable: bool = False) -> list[sa.schema.SchemaItem]:
    """Columns of whole numbers with these names."""
    return [sa.Column(name, sa.Integer, nullable=nullable) for name in names.split()]


def objects(names: str, nullable: bool = True) -> list[sa.schema.SchemaItem]:
    """Columns of JSON with these names."""
    return [sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable) for name in names.split()]


def reference(name: str, row: str, nullable: bool = False) -> sa.schema.SchemaItem:
    """A column with the id of another `row`, such as `jobs.id`."""
    return sa.Column(name, sa.Text, sa.ForeignKey(row), nullable=nullable)
