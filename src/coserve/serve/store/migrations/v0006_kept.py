"""Counts what the server keeps of each tenant: rows and bytes by table, which triggers keep up to date."""

from alembic import op
from sqlalchemy import Column, Integer, Text

revision = "0006"
down_revision = "0005"

_ROW = 200  # bytes that a row takes beside its texts: numbers, keys, entries in indices
_OWN = "{row}.tenant"
_OF_JOB = "(SELECT tenant FROM jobs WHERE id = {row}.job)"
# The owner of a row of each table, and its columns of texts and JSON. `bytes` is the size of a row's files.
TABLES = {
    "files": (_OWN, "id tenant filename purpose suffix", True),
    "adapters": (_OWN, "id name path base tenant parent job", True),
    "jobs": (
        _OWN,
        "id tenant status model name base training_file hyperparameters options peft optimizer "
        "validation_file suffix metadata start_from error result_file",
        False,
    ),
    "events": (_OF_JOB, "id job level message type data", False),
    "checkpoints": (_OF_JOB, "id job name path digest metrics", True),
    "quarantine": (_OWN, "id tenant kind subject reason details", False),
    "tinker_sessions": (_OWN, "id tenant display_name user_metadata project finished", False),
    "tinker_samplers": (_OWN, "id tenant session model", False),
    "tinker_runs": (_OWN, "id tenant session base lora user_metadata", False),
    "tinker_checkpoints": (_OWN, "id tenant run kind name path base lora user_metadata", True),
}


def count_rows(table: str, owner: str, columns: str, has_files: bool) -> None:
    """Adds triggers that count a table's rows, and counts what is there."""
    each = owner.format(row="r")
    op.execute(
        f"INSERT INTO kept (tenant, kind, rows, bytes) SELECT {each}, '{table}', count(*), "
        f"sum({_size('r', columns, has_files)}) FROM {table} AS r WHERE {each} IS NOT NULL GROUP BY {each}"
    )
    add_triggers(table, owner, columns, has_files)


def add_triggers(table: str, owner: str, columns: str, has_files: bool) -> None:
    """Adds triggers that count a table's rows from now on."""
    if op.get_context().dialect.name == "postgresql":
        _add_function(table, owner, columns, has_files)
        return
    new, old = (owner.format(row=row) for row in ("NEW", "OLD"))
    size_new, size_old = (_size(row, columns, has_files) for row in ("NEW", "OLD"))
    op.execute(
        f"CREATE TRIGGER kept_{table}_insert AFTER INSERT ON {table} WHEN {new} IS NOT NULL BEGIN "
        "INSERT INTO kept (tenant, kind, rows, bytes) "
        f"VALUES ({new}, '{table}', 1, {size_new}) "
        "ON CONFLICT (tenant, kind) DO UPDATE SET rows = rows + 1, bytes = bytes + excluded.bytes; END"
    )
    op.execute(
        f"CREATE TRIGGER kept_{table}_delete AFTER DELETE ON {table} BEGIN "
        f"UPDATE kept SET rows = rows - 1, bytes = bytes - ({size_old}) "
        f"WHERE tenant = {old} AND kind = '{table}'; END"
    )
    op.execute(
        f"CREATE TRIGGER kept_{table}_update AFTER UPDATE ON {table} BEGIN "
        f"UPDATE kept SET bytes = bytes - ({size_old}) + {size_new} "
        f"WHERE tenant = {new} AND kind = '{table}'; END"
    )


def drop_triggers(table: str) -> None:
    """Removes a table's triggers, which `add_triggers` makes anew."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"DROP FUNCTION kept_{table} CASCADE")
        return
    for when in ("insert", "delete", "update"):
        op.execute(f"DROP TRIGGER kept_{table}_{when}")


def _add_function(table: str, owner: str, columns: str, has_files: bool) -> None:
    """The triggers of `add_triggers` in PostgreSQL's words."""
    new, old = (owner.format(row=row) for row in ("NEW", "OLD"))
    size_new, size_old = (_size(row, columns, has_files) for row in ("NEW", "OLD"))
    op.execute(
        f"CREATE FUNCTION kept_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF TG_OP = 'INSERT' THEN IF {new} IS NOT NULL THEN "
        f"INSERT INTO kept (tenant, kind, rows, bytes) VALUES ({new}, '{table}', 1, {size_new}) "
        "ON CONFLICT (tenant, kind) DO UPDATE SET rows = kept.rows + 1, bytes = kept.bytes + excluded.bytes; "
        "END IF; ELSIF TG_OP = 'DELETE' THEN "
        f"UPDATE kept SET rows = rows - 1, bytes = bytes - ({size_old}) "
        f"WHERE tenant = {old} AND kind = '{table}'; "
        f"ELSE UPDATE kept SET bytes = bytes - ({size_old}) + {size_new} "
        f"WHERE tenant = {new} AND kind = '{table}'; END IF; RETURN NULL; END $$"
    )
    op.execute(
        f"CREATE TRIGGER kept_{table} AFTER INSERT OR UPDATE OR DELETE ON {table} "
        f"FOR EACH ROW EXECUTE FUNCTION kept_{table}()"
    )


def _size(row: str, columns: str, has_files: bool) -> str:
    length = "length(CAST({} AS BLOB))"
    if op.get_context().dialect.name == "postgresql":
        length = "octet_length(CAST({} AS TEXT))"
    texts = (f"coalesce({length.format(f'{row}.{column}')}, 0)" for column in columns.split())
    return " + ".join([str(_ROW), *texts, *([f"{row}.bytes"] if has_files else [])])


def upgrade() -> None:
    """Adds the table `kept`, the bytes of adapters' and checkpoints' files (the server counts them at
    its start) and triggers, and counts what is there."""
    for table in ("adapters", "checkpoints"):
        op.add_column(table, Column("bytes", Integer, nullable=False, server_default="0"))
    op.create_table(
        "kept",
        Column("tenant", Text, primary_key=True),
        Column("kind", Text, primary_key=True),
        Column("rows", Integer, nullable=False),
        Column("bytes", Integer, nullable=False),
    )
    for table, counted in TABLES.items():
        count_rows(table, *counted)
