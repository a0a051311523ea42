"""Rows of uploads that come in parts."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, owned, reads, writes
from coserve.serve.store.files import PutFile
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import File, UploadRecord

MOST_EXPIRED_UPLOADS: Final = 100  # that one turn ends: the writing thread is shared


class UploadStore:
    """Uploads and their owners. One that is pending counts as if all of its bytes were there."""

    def __init__(self, database: Database, clock: Callable[[], float], quotas: Quotas, put: PutFile) -> None:
        self._database, self._clock, self._quotas, self._put = database, clock, quotas, put

    @writes
    def add(self, session: Session, upload: UploadRecord) -> None:
        """Adds an upload. Raises QuotaExceeded."""
        self._quotas.check_storage(session, upload.tenant, upload.size)
        session.add(upload)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> UploadRecord | None:
        """The tenant's upload with this id."""
        return owned(session, UploadRecord, tenant, id)

    async def end(self, id: str, status: str, file: File | None = None) -> bool:
        """Ends a pending upload, with its file if it is completed; False if it is not pending. Raises
        QuotaExceeded, and StateError where the artifact store is away."""
        if file is not None:
            await self._put(file)

        def write(session: Session) -> bool:
            values: dict[str, Any] = {"status": status, "bytes": 0, "file": None if file is None else file.id}
            pending = UploadRecord.id == id, UploadRecord.status == "pending"
            found = session.scalar(select(UploadRecord).where(*pending))
            if found is None:
                return False
            session.execute(update(UploadRecord).where(*pending).values(**values))
            if file is not None:
                self._quotas.check_storage(session, file.tenant, file.bytes)
                session.add(file)
            return True

        return await self._database.write(write)

    @reads
    def expired(self, session: Session) -> Sequence[UploadRecord]:
        """Some uploads that are pending after their time, of all tenants."""
        late = UploadRecord.status == "pending", UploadRecord.expires <= self._clock()
        return tuple(session.scalars(select(UploadRecord).where(*late).limit(MOST_EXPIRED_UPLOADS)))
