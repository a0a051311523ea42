"""Rows of uploaded and result files."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL, UNFINISHED
from coserve.errors import ConflictError
from coserve.serve.store.audit import note_action
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, page_of, reads, writes
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import File, JobRecord, Page

PutFile = Callable[[File], Awaitable[None]]  # has all servers find a file's bytes
MOST_EXPIRED: Final = 500  # files that one turn deletes: the writing thread is shared


class FileStore:
    """Files and their owners. The bytes are on disk before `add`, and deleted after `remove`.

    A file that has expired is treated as missing once no unfinished job reads it; no job can begin to then.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        quotas: Quotas,
        creations: CreationStore,
        put: PutFile,
    ) -> None:
        self._database, self._clock, self._quotas, self._creations = database, clock, quotas, creations
        self._put = put

    async def add(self, file: File) -> None:
        """Adds an uploaded file. Raises QuotaExceeded, and StateError where the artifact store is away."""
        await self._put(file)

        def write(session: Session) -> None:
            self._quotas.check_storage(session, file.tenant, file.bytes)
            session.add(file)
            details = f"{file.purpose}, {file.bytes} bytes"
            note_action(session, int(self._clock()), "file.created", file.id, file.tenant, details)
            self._creations.note(session, f"/v1/files/{file.id}")

        await self._database.write(write)

    @reads
    def check_room(self, session: Session, tenant: str, size: int, number: int) -> None:
        """Raises QuotaExceeded where `number` more uploads of `size` bytes in all would have no room."""
        self._quotas.check_storage(session, tenant, size, number)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> File | None:
        """The tenant's file with this id."""
        return session.scalar(select(File).where(*self._is(tenant, id)))

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        after: str | None,
        limit: int,
        ascending: bool,
        purpose: str | None = None,
    ) -> Page[File] | None:
        """The tenant's files after the one with id `after`; None if it has no such file."""
        own = [File.tenant == tenant, lasting(self._clock())]
        wanted = [] if purpose is None else [File.purpose == purpose]
        return page_of(session, File, own, after, limit, ascending, filters=wanted)

    @writes
    def remove(self, session: Session, tenant: str, id: str) -> File | None:
        """Removes a file and returns it; None if the tenant has no such file.

        Raises ConflictError while an unfinished job reads it.
        """
        reads = or_(JobRecord.training_file == id, JobRecord.validation_file == id)
        file = session.scalar(select(File).where(*self._is(tenant, id)))
        if file is None:
            return None
        user = session.scalar(select(JobRecord.id).where(reads, JobRecord.status.not_in(FINAL)))
        if user is not None:
            raise ConflictError(f"{id} is read by the job {user}: wait for its end, or cancel it")
        session.delete(file)
        note_action(session, int(self._clock()), "file.deleted", file.id, tenant)
        return file

    @reads
    def expired(self, session: Session) -> Sequence[File]:
        """Some files that have expired, of all tenants, whose bytes may go."""
        now = self._clock()
        found = select(File).where(File.expires <= now, ~lasting(now)).limit(MOST_EXPIRED)
        return tuple(session.scalars(found))

    @writes
    def forget(self, session: Session, expired: Sequence[File]) -> None:
        """Removes the rows of files that have expired."""
        session.execute(delete(File).where(File.id.in_([file.id for file in expired])))

    def _is(self, tenant: str, id: str) -> tuple[ColumnElement[bool], ...]:
        return File.tenant == tenant, File.id == id, lasting(self._clock())


def lasting(now: float) -> ColumnElement[bool]:
    """Condition for files that have not expired, or that an unfinished job reads."""
    reads = or_(JobRecord.training_file == File.id, JobRecord.validation_file == File.id)
    is_read = select(JobRecord.id).where(JobRecord.status.in_(UNFINISHED), reads).exists()
    return or_(File.expires.is_(None), File.expires > now, is_read)
