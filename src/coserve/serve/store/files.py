"""Rows of uploaded and result files."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, Select, delete, insert, or_, select

from coserve.core.job_status import FINAL
from coserve.errors import ConflictError
from coserve.serve.store.database import Database, columns_of, page_of
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import File, Page
from coserve.serve.store.tables import files, jobs

_FIELDS: Final = tuple(field.name for field in fields(File))


class FileStore:
    """Files and their owners. The bytes are on disk before `add`, and deleted after `remove`."""

    def __init__(self, database: Database, clock: Callable[[], float], folder: Path, quotas: Quotas) -> None:
        self._database, self._clock, self._folder, self._quotas = database, clock, folder, quotas

    async def add(self, file: File) -> None:
        """Acknowledges an upload. Raises QuotaExceeded where its owner has no room for it."""

        def write(connection: Connection) -> None:
            self._quotas.check_storage(connection, self._folder, file.tenant, file.bytes)
            insert_file(connection, file)

        await self._database.write(write)

    async def check_room(self, tenant: str, size: int, number: int) -> None:
        """Raises QuotaExceeded where `number` more uploads of `size` bytes in all would have no room."""
        await self._database.read(
            lambda connection: self._quotas.check_storage(connection, self._folder, tenant, size, number)
        )

    async def get(self, tenant: str, id: str) -> File | None:
        """The tenant's file with this id."""
        found = _of(tenant).where(files.c.id == id)

        def read(connection: Connection) -> File | None:
            row = connection.execute(found).mappings().first()
            return None if row is None else _record(row)

        return await self._database.read(read)

    async def page(
        self, tenant: str, after: str | None, limit: int, ascending: bool, purpose: str | None = None
    ) -> Page[File] | None:
        """The tenant's files from behind `after`; None if it has no such file."""
        query = _of(tenant)
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        return await self._database.read(
            lambda connection: page_of(connection, query, files, _record, after, limit, ascending)
        )

    async def remove(self, tenant: str, id: str) -> File | None:
        """Forgets a file and says what it was; None if the tenant has no such file.

        Raises ConflictError while a job that reads it is not over.
        """
        found = _of(tenant).where(files.c.id == id)
        reads = or_(jobs.c.training_file == id, jobs.c.validation_file == id)

        def write(connection: Connection) -> File | None:
            row = connection.execute(found).mappings().first()
            if row is None:
                return None
            user = connection.execute(select(jobs.c.id).where(reads, jobs.c.status.not_in(FINAL))).scalar()
            if user is not None:
                raise ConflictError(f"{id} is read by the job {user}: wait for its end, or cancel it")
            connection.execute(delete(files).where(files.c.id == id))
            return _record(row)

        return await self._database.write(write)


def insert_file(connection: Connection, file: File) -> None:
    """Adds the row."""
    connection.execute(insert(files).values(asdict(file)))


def _of(tenant: str) -> Select[Any]:
    return columns_of(files, _FIELDS).where(files.c.tenant == tenant)


def _record(row: RowMapping) -> File:
    return File(**row)
