"""The tables of batches, and of uploads in parts."""

from alembic import op

from coserve.serve.store.migrations.v0006_kept import count_rows
from coserve.serve.store.tables import integers, make_records, objects, texts

revision = "0012"
down_revision = "0011"

_TEXTS = "id tenant status endpoint input_file metadata output_file error_file errors"
TABLES = {
    "batches": ("{row}.tenant", _TEXTS, False),
    "uploads": ("{row}.tenant", "id tenant status filename purpose file", True),
}


def upgrade() -> None:
    """Adds the tables, empty."""
    make_records(
        "batches",
        *(*texts("status endpoint input_file"), *integers("created window")),
        *(*integers("life", nullable=True), *objects("metadata")),
        *(*integers("began cancelling finalizing ended", nullable=True), *integers("total completed failed")),
        *(*texts("output_file error_file", nullable=True), *objects("errors")),
    )
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_index("batches_of_tenant", "batches", ["tenant", "number"])
    make_records(
        "uploads",
        *(*texts("status filename purpose"), *integers("size bytes created expires")),
        *(*integers("life", nullable=True), *texts("file", nullable=True)),
    )
    op.create_index("ix_uploads_expires", "uploads", ["expires"])
    op.create_index("uploads_of_tenant", "uploads", ["tenant", "number"])
    for table, counted in TABLES.items():
        count_rows(table, *counted)
