"""Tenants and bytes of what is kept of `tinker` clients' training runs, which count towards quotas."""

import sqlalchemy as sa
from alembic import op

from coserve.serve.store.migrations import v0006_kept

revision = "0024"
down_revision = "0023"

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # where it has 64 bits, too
_OWN = "{row}.tenant"
# The data of requests are bytes, which `bytes` counts.
TABLES = {
    "tinker_requests": (_OWN, "run tenant kind encoding outcome", True),
    "tinker_states": (_OWN, "run tenant path", True),
}


def upgrade() -> None:
    """Adds both columns, and has triggers count rows. What is kept of runs whose session is gone goes, as
    nobody can go on with them. Bytes of states are counted from their next one on."""
    session = "substr(run, 1, instr(run, ':') - 1)"
    if op.get_context().dialect.name == "postgresql":
        session = "split_part(run, ':', 1)"
    for table, counted in TABLES.items():
        op.add_column(table, sa.Column("tenant", sa.Text, nullable=False, server_default=""))
        op.add_column(table, sa.Column("bytes", _BIG, nullable=False, server_default="0"))
        owner = f"SELECT tenant FROM tinker_sessions WHERE id = {session}"
        op.execute(f"DELETE FROM {table} WHERE NOT EXISTS ({owner})")
        op.execute(f"UPDATE {table} SET tenant = ({owner})")
        if table == "tinker_requests":
            op.execute(f"UPDATE {table} SET bytes = length(data)")
        v0006_kept.count_rows(table, *counted)
