"""Beside jobs, for OpenAI's fine-tuning: integrations, permissions of checkpoints, and evals."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations import v0006_kept
from coserve.serve.store.tables import integers, make_records, objects, reference, texts

revision = "0013"
down_revision = "0012"

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
    make_records(
        "checkpoint_permissions",
        *(*texts("checkpoint project"), *integers("created")),
        sa.UniqueConstraint("tenant", "checkpoint", "project", name="one_permission_a_project"),
    )
    op.create_index("permissions_of_project", "checkpoint_permissions", ["project", "checkpoint"])
    make_records(
        "evals",
        *(*texts("name"), *integers("created"), *objects("source criteria", nullable=False)),
        *objects("metadata"),
    )
    op.create_index("evals_of_tenant", "evals", ["tenant", "number"])
    make_records(
        "eval_runs",
        *(reference("eval", "evals.id"), *texts("name"), *integers("created"), *texts("status")),
        *(*objects("source tally", nullable=False), *texts("model", nullable=True)),
        *objects("metadata error"),
    )
    op.create_index("runs_of_eval", "eval_runs", ["eval", "number"])
    op.create_index("ix_eval_runs_status", "eval_runs", ["status"])
    make_records(
        "eval_items",
        *(reference("run", "eval_runs.id"), *integers("place created"), *texts("status")),
        *(*objects("item results", nullable=False), *objects("sample")),
        sa.UniqueConstraint("run", "place", name="one_eval_item_a_place"),
    )
    op.create_index("items_of_run", "eval_items", ["run", "number"])
    for table, counted in _NEW.items():
        v0006_kept.count_rows(table, *counted)
