"""Adapters that can be sampled by name: finished ones, imported ones, and checkpoints."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    delete,
    false,
    insert,
    or_,
    select,
    update,
)

from coserve.core.job_status import FINAL
from coserve.errors import ConflictError
from coserve.serve.store.database import Database
from coserve.serve.store.quotas import Quotas, bytes_in
from coserve.serve.store.records import Adapter
from coserve.serve.store.tables import adapters, checkpoints, jobs

_FIELDS: Final = tuple(field.name for field in fields(Adapter))


class AdapterStore:
    """Names that a tenant may put where OpenAI's API has a model."""

    def __init__(self, database: Database, clock: Callable[[], float], folder: Path, quotas: Quotas) -> None:
        self._database, self._clock, self._folder, self._quotas = database, clock, folder, quotas

    async def list(self, tenant: str, base: str) -> tuple[Adapter, ...]:
        """The tenant's adapters of a base and those that everybody may use, the oldest first; no
        checkpoints."""
        found = select(adapters).where(_visible(tenant, base)).order_by(adapters.c.number)

        def read(connection: Connection) -> tuple[Adapter, ...]:
            return tuple(self._record(row) for row in connection.execute(found).mappings())

        return await self._database.read(read)

    async def find(self, tenant: str, name: str, base: str) -> Adapter | None:
        """The adapter or checkpoint of a base that this tenant calls `name`; its own come before
        everybody's."""

        def read(connection: Connection) -> Adapter | None:
            named = select(adapters).where(_visible(tenant, base), adapters.c.name == name)
            return self._first(
                connection,
                named.order_by(adapters.c.tenant.is_(None)),
                _checkpoints().where(
                    jobs.c.tenant == tenant, jobs.c.base == base, checkpoints.c.name == name
                ),
            )

        return await self._database.read(read)

    async def get(self, id: str) -> Adapter | None:
        """The adapter or checkpoint with this id, whoever owns it."""

        def read(connection: Connection) -> Adapter | None:
            return self._first(
                connection,
                select(adapters).where(adapters.c.id == id),
                _checkpoints().where(checkpoints.c.id == id),
            )

        return await self._database.read(read)

    async def add(self, adapter: Adapter) -> bool:
        """Names an uploaded adapter whose folder is on disk; False if this tenant has one of that name, of
        whichever base. Raises QuotaExceeded where its owner has no room for it."""

        def write(connection: Connection) -> bool:
            if adapter.tenant is not None:
                size = bytes_in(adapter.path)
                self._quotas.check_storage(connection, self._folder, adapter.tenant, size)
            return insert_adapter(connection, adapter, self._folder)

        return await self._database.write(write)

    async def share(self, shared: Sequence[Adapter]) -> None:
        """Makes these, and no others, the adapters that everybody may use."""
        ids = [adapter.id for adapter in shared]

        def write(connection: Connection) -> None:
            connection.execute(delete(adapters).where(adapters.c.tenant.is_(None), adapters.c.id.not_in(ids)))
            for adapter in shared:
                insert_adapter(connection, adapter, self._folder)

        await self._database.write(write)

    async def sweep(self) -> None:
        """Removes folders that no adapter has: of imports that a killed server did not get to the end of. No
        import may be under way."""
        found = select(adapters.c.path)
        known = await self._database.read(lambda connection: set(connection.execute(found).scalars()))
        for folder in (self._folder / "adapters").iterdir():
            if relative(folder, self._folder) not in known:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def remove(self, tenant: str, name: str) -> Adapter | None:
        """Forgets the tenant's own adapter `name` and says what it was; None if there is none.

        Its folder is the caller's to delete, if it lies in the state folder. Raises ConflictError while a
        job that began with it is not over.
        """
        own = (adapters.c.tenant == tenant) & (adapters.c.name == name)

        def write(connection: Connection) -> Adapter | None:
            found = self._first(connection, select(adapters).where(own))
            if found is None:
                return None
            begun = jobs.c.start_from == found.id
            user = connection.execute(select(jobs.c.id).where(begun, jobs.c.status.not_in(FINAL))).scalar()
            if user is not None:
                raise ConflictError(f"{name} is where the job {user} begins: wait for its end, or cancel it")
            connection.execute(delete(adapters).where(own))
            return found

        return await self._database.write(write)

    async def pin(self, id: str, pinned: bool) -> None:
        """Notes whether an adapter stays in the engine's memory."""
        changed = update(adapters).where(adapters.c.id == id).values(pinned=pinned)
        await self._database.write(lambda connection: connection.execute(changed))

    async def pinned(self, base: str) -> tuple[Adapter, ...]:
        """Adapters of a base that stay in the engine's memory, whoever owns them."""
        found = select(adapters).where(adapters.c.pinned, adapters.c.base == base).order_by(adapters.c.number)

        def read(connection: Connection) -> tuple[Adapter, ...]:
            return tuple(self._record(row) for row in connection.execute(found).mappings())

        return await self._database.read(read)

    def _first(self, connection: Connection, *queries: Select[Any]) -> Adapter | None:
        """The first row of the first query that has one."""
        for query in queries:
            if (row := connection.execute(query).mappings().first()) is not None:
                return self._record(row)
        return None

    def _record(self, row: RowMapping) -> Adapter:
        return Adapter(**{**{name: row[name] for name in _FIELDS}, "path": self._folder / row["path"]})


def insert_adapter(connection: Connection, adapter: Adapter, folder: Path) -> bool:
    """Adds the row, with the path relative to the state folder; False if its owner has that name already."""
    same = (adapters.c.tenant.is_not_distinct_from(adapter.tenant)) & (adapters.c.name == adapter.name)
    if connection.execute(select(adapters.c.id).where(same)).first() is not None:
        return False
    values = {name: getattr(adapter, name) for name in _FIELDS}
    connection.execute(insert(adapters).values({**values, "path": relative(adapter.path, folder)}))
    return True


def relative(path: Path, folder: Path) -> str:
    """`path` as rows hold it: the state folder may be moved, so what lies in it is found from there."""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path.absolute())


def _visible(tenant: str, base: str) -> ColumnElement[bool]:
    return and_(adapters.c.base == base, or_(adapters.c.tenant == tenant, adapters.c.tenant.is_(None)))


def _checkpoints() -> Select[Any]:
    """Checkpoints as adapters."""
    return select(
        checkpoints.c.id,
        checkpoints.c.name,
        checkpoints.c.path,
        jobs.c.base,
        checkpoints.c.created,
        jobs.c.tenant,
        jobs.c.model.label("parent"),
        checkpoints.c.job,
        checkpoints.c.step,
        false().label("pinned"),
    ).join(jobs, checkpoints.c.job == jobs.c.id)
