"""`coserve usage` and `coserve audit`: what tenants used and did, from the server's state folder."""

import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from coserve.cli.keys import StoreOptions
from coserve.cli.options import AsJson, unfolded
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.serve.store.store import Store

_DAY = 86_400
Tenant = Annotated[str | None, typer.Option(metavar="NAME", help="Of this tenant alone.")]
Days = Annotated[float, typer.Option(min=0, help="Of so many days until now.")]


class Width(StrEnum):
    """Lengths of a row's time."""

    HOUR = "hour"
    DAY = "day"


@unfolded
def usage(
    place: StoreOptions,
    by: Annotated[Width, typer.Option(help="Rows of hours or of days (UTC).")] = Width.DAY,
    days: Days = 30.0,
    tenant: Tenant = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of a table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows usage of each tenant, by key, model and version: requests, tokens, and the most bytes kept.

    The figures of a server that runs are up to five seconds old.
    """
    from coserve.cli.output import print_json, print_table
    from coserve.serve.store.usage import HOUR

    width = HOUR if by is Width.HOUR else _DAY
    since = int(time.time() - days * _DAY) // width * width

    async def read(store: "Store") -> list[dict[str, str | int]]:
        from coserve.serve.processes.claim import find_running

        if find_running(store.folder) is None:
            await store.usage.open()
        names = {one.id: one.name for one in await store.tenants.list()}
        wanted = _id_of(tenant, names)
        found = await store.usage.rows(since, 2**40, width, tenant=wanted)
        return [
            {
                "start": _moment(start),
                **groups,
                "tenant": names.get(groups["tenant"], groups["tenant"]),
                **counts,
            }
            for start, groups, counts in found
        ]

    rows = place.run(read)
    if as_json:
        return print_json(rows)
    if as_csv:
        return _print_csv(rows)
    columns = tuple(rows[0]) if rows else ()
    print_table(columns, [[str(value) for value in row.values()] for row in rows], "nothing was used")


@unfolded
def audit(
    place: StoreOptions,
    days: Days = 30.0,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The newest so many.")] = 1000,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Shows the audit log: who did what to keys, adapters, jobs, files and limits, the oldest first."""
    from coserve.cli.output import print_json, print_table

    async def read(store: "Store") -> list[dict[str, str]]:
        names = {one.id: one.name for one in await store.tenants.list()}
        found = await store.audit.list(_id_of(tenant, names), time.time() - days * _DAY, limit)
        told = ("actor", "action", "subject", "tenant", "key", "address", "request_id", "details")
        rows = [{"time": _moment(row.time), **{name: getattr(row, name) for name in told}} for row in found]
        return [row | {"tenant": names.get(row["tenant"], row["tenant"])} for row in rows]

    rows = place.run(read)
    if as_json:
        return print_json(rows)
    columns = tuple(rows[0]) if rows else ()
    print_table(columns, [list(row.values()) for row in rows], "nothing was done")


def _id_of(tenant: str | None, names: dict[str, str]) -> str | None:
    if tenant is None:
        return None
    found = next((id for id, name in names.items() if name == tenant), None)
    if found is None:
        raise ConfigError(f"there is no tenant {tenant!r}: `coserve keys list` shows them")
    return found


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _print_csv(rows: list[dict[str, str | int]]) -> None:
    import csv
    import sys

    from coserve.serve.store.usage import COUNTS, GROUPS

    columns = ("start", *GROUPS, *COUNTS, "kept_bytes")
    written = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    written.writeheader()
    written.writerows({name: _plain(value) for name, value in row.items()} for row in rows)


def _plain(value: str | int) -> str | int:
    """A cell that no spreadsheet takes for a formula: names of adapters are their tenants' own."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
