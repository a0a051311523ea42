"""Rows of batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from coserve.errors import QuotaExceeded
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.files import PutFile
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import BatchRecord, File, Page

UNENDED: Final = ("validating", "in_progress", "finalizing", "cancelling")
INPUT: Final = "input.jsonl"  # in a batch's folder
MOST_UNENDED: Final = 64  # batches of one tenant


class BatchStore:
    """Batches and their tenants. What the server that runs a batch writes about it is fenced by its lease."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        quotas: Quotas,
        creations: CreationStore,
        put: PutFile,
        leases: Leases,
    ) -> None:
        self._database, self._clock, self._quotas, self._creations = database, clock, quotas, creations
        self._put, self._leases = put, leases

    @writes
    def add(self, session: Session, batch: BatchRecord) -> None:
        """Adds a batch. Raises QuotaExceeded."""
        own = BatchRecord.tenant == batch.tenant, BatchRecord.status.in_(UNENDED)
        if session.scalars(select(func.count()).where(*own)).one() >= MOST_UNENDED:
            raise QuotaExceeded(
                f"You have {MOST_UNENDED} batches that are not over: wait for an end, or cancel one."
            )
        session.add(batch)
        self._creations.note(session, f"/v1/batches/{batch.id}")
        self._quotas.check_kept(session, batch.tenant)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> BatchRecord | None:
        """The tenant's batch with this id."""
        return owned(session, BatchRecord, tenant, id)

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        after: str | None,
        limit: int,
        endpoint: str | None = None,
        ascending: bool = False,
    ) -> Page[BatchRecord] | None:
        """The tenant's batches after the one with id `after`, the newest first unless `ascending`; None if
        there is none. Those of an `endpoint` alone, or all that were made of a file."""
        of = BatchRecord.input_file != "" if endpoint is None else BatchRecord.endpoint == endpoint
        own = [BatchRecord.tenant == tenant, of]
        return page_of(session, BatchRecord, own, after, limit, ascending)

    @writes
    def remove(self, session: Session, tenant: str, id: str) -> bool:
        """Removes a batch that has ended; False where the tenant has no such one."""
        over = BatchRecord.tenant == tenant, BatchRecord.id == id, BatchRecord.status.not_in(UNENDED)
        return session.execute(delete(BatchRecord).where(*over)).rowcount > 0  # type: ignore[attr-defined,no-any-return]

    @reads
    def unended(self, session: Session) -> Sequence[BatchRecord]:
        """All tenants' batches that have not ended, the oldest first."""
        found = select(BatchRecord).where(BatchRecord.status.in_(UNENDED)).order_by(BatchRecord.number)
        return tuple(session.scalars(found))

    @writes
    def cancel(self, session: Session, id: str, now: int) -> BatchRecord | None:
        """Asks the owner of a batch that has not begun to end to cancel it; returns it, None for others."""
        changed = {"status": "cancelling", "cancelling": now}
        return _changed(session, id, ("validating", "in_progress"), changed)

    async def advance(
        self, id: str, source: Collection[str], files: Sequence[File] = (), **values: Any
    ) -> BatchRecord | None:
        """Changes columns of this server's batch whose status is one of `source`, and adds its files; returns
        it, None if it has another status. Raises LeaseLost where another server has taken it, and StateError
        where the artifact store is away."""
        for file in files:
            await self._put(file)

        def write(session: Session) -> BatchRecord | None:
            self._leases.require(session, "batch", id)
            found = _changed(session, id, source, values)
            if found is not None:
                session.add_all(files)
            return found

        return await self._database.write(write)


def _changed(
    session: Session, id: str, source: Collection[str], values: Mapping[str, Any]
) -> BatchRecord | None:
    wanted = BatchRecord.id == id, BatchRecord.status.in_(source)
    if not session.execute(update(BatchRecord).where(*wanted).values(**values)).rowcount:  # type: ignore[attr-defined]
        return None
    return session.scalar(select(BatchRecord).where(BatchRecord.id == id))
