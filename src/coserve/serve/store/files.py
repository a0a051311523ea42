"""Rows of uploaded and result files."""

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.errors import ConflictError
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, page_of
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import File, JobRecord, Page


class FileStore:
    """Files and their owners. The bytes are on disk before `add`, and deleted after `remove`."""

    def __init__(self, database: Database, quotas: Quotas, creations: CreationStore) -> None:
        self._database, self._quotas, self._creations = database, quotas, creations

    async def add(self, file: File) -> None:
        """Adds an uploaded file. Raises QuotaExceeded."""
        note = self._creations.noting()

        def write(session: Session) -> None:
            self._quotas.check_storage(session, file.tenant, file.bytes)
            session.add(file)
            note(session, f"/v1/files/{file.id}")

        await self._database.write(write)

    async def check_room(self, tenant: str, size: int, number: int) -> None:
        """Raises QuotaExceeded where `number` more uploads of `size` bytes in all would have no room."""
        await self._database.read(lambda session: self._quotas.check_storage(session, tenant, size, number))

    async def get(self, tenant: str, id: str) -> File | None:
        """The tenant's file with this id."""
        found = select(File).where(*_is(tenant, id))
        return await self._database.read(lambda session: session.scalar(found))

    async def page(
        self, tenant: str, after: str | None, limit: int, ascending: bool, purpose: str | None = None
    ) -> Page[File] | None:
        """The tenant's files after the one with id `after`; None if it has no such file."""
        wanted = [File.tenant == tenant]
        if purpose is not None:
            wanted.append(File.purpose == purpose)
        return await self._database.read(
            lambda session: page_of(session, File, wanted, after, limit, ascending)
        )

    async def remove(self, tenant: str, id: str) -> File | None:
        """Removes a file and returns it; None if the tenant has no such file.

        Raises ConflictError while an unfinished job reads it.
        """
        reads = or_(JobRecord.training_file == id, JobRecord.validation_file == id)

        def write(session: Session) -> File | None:
            file = session.scalar(select(File).where(*_is(tenant, id)))
            if file is None:
                return None
            user = session.scalar(select(JobRecord.id).where(reads, JobRecord.status.not_in(FINAL)))
            if user is not None:
                raise ConflictError(f"{id} is read by the job {user}: wait for its end, or cancel it")
            session.delete(file)
            return file

        return await self._database.write(write)


def _is(tenant: str, id: str) -> tuple[ColumnElement[bool], ...]:
    return File.tenant == tenant, File.id == id
