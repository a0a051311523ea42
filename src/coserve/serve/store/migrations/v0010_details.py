"""Columns for the findings of an uploaded file's check."""

from alembic import op
from sqlalchemy import Column, Text

from coserve.serve.store.migrations import v0006_kept

revision = "0010"
down_revision = "0009"

_OWNER, _COLUMNS, _HAS_FILES = v0006_kept.TABLES["files"]
TABLES = {"files": (_OWNER, f"{_COLUMNS} details", _HAS_FILES)}


def upgrade() -> None:
    """Adds the column `details`, empty, and has the triggers of `kept` count its text."""
    op.add_column("files", Column("details", Text, nullable=True))
    v0006_kept.drop_triggers("files")
    v0006_kept.add_triggers("files", *TABLES["files"])
