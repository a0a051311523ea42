"""Beside jobs, for OpenAI's fine-tuning: integrations, permissions of checkpoints, and evals."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations import v0006_kept

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_OWNER, _COLUMNS, _HAS_FILES = v0006_kept.TABLES["jobs"]
_OWN = "{row}.tenant"
_NEW = {
    "checkpoint_permissions": (_OWN, "id tenant checkpoint project", False),
    "evals": (_OWN, "id tenant name source criteria metadata", False),
    "eval_runs": (_OWN, "id tenant eval name status model source tally metadata error", False),
    "eval_items": (_OWN, "id tenant run status item sample results", False),
}
TABLES = {"jobs": (_OWNER, f"{_COLUMNS} integrations", _HAS_FILES), **_NEW}


def upgrade() -> None:
    """Adds a column of jobs and the tables, empty, and has triggers count them."""
    op.add_column("jobs", sa.Column("integrations", sa.JSON, nullable=True))
    v0006_kept.drop_triggers("jobs")
    v0006_kept.add_triggers("jobs", *TABLES["jobs"])
    _table(
        "checkpoint_permissions",
        _text("checkpoint"),
        _text("project"),
        _number("created"),
        sa.UniqueConstraint("tenant", "checkpoint", "project", name="one_permission_a_project"),
    )
    op.create_index("permissions_of_project", "checkpoint_permissions", ["project", "checkpoint"])
    _table(
        "evals",
        _text("name"),
        _number("created"),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("criteria", sa.JSON, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=True),
    )
    op.create_index("evals_of_tenant", "evals", ["tenant", "number"])
    _table(
        "eval_runs",
        sa.Column("eval", sa.Text, sa.ForeignKey("evals.id"), nullable=False),
        _text("name"),
        _number("created"),
        _text("status"),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("tally", sa.JSON, nullable=False),
        sa.Column("model", sa.Text, nullable=True),
        sa.Column("metadata", sa.JSON, nullable=True),
        sa.Column("error", sa.JSON, nullable=True),
    )
    op.create_index("runs_of_eval", "eval_runs", ["eval", "number"])
    op.create_index("ix_eval_runs_status", "eval_runs", ["status"])
    _table(
        "eval_items",
        sa.Column("run", sa.Text, sa.ForeignKey("eval_runs.id"), nullable=False),
        _number("place"),
        _number("created"),
        _text("status"),
        sa.Column("item", sa.JSON, nullable=False),
        sa.Column("results", sa.JSON, nullable=False),
        sa.Column("sample", sa.JSON, nullable=True),
        sa.UniqueConstraint("run", "place", name="one_eval_item_a_place"),
    )
    op.create_index("items_of_run", "eval_items", ["run", "number"])
    for table, counted in _NEW.items():
        v0006_kept.count_rows(table, *counted)


def _table(name: str, *columns: sa.schema.SchemaItem) -> None:
    op.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
        *columns,
        sqlite_autoincrement=True,
    )


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False)
