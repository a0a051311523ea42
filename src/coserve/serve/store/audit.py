"""The audit log: who did what to keys, adapters, jobs, files and the server's limits."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, writes
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import AuditRecord
from coserve.wire.logs import context

MOST_AUDITED: Final = 100_000  # rows of one tenant: beyond, its own oldest go
_TURN: Final = 5000  # rows that one turn deletes: the writing thread is shared
SERVER: Final = "server"  # the actor of what nobody asked for
STRANGER: Final = "stranger"  # actor and tenant of wrong keys: so these push no other rows out


class AuditStore:
    """Rows of the audit log. A row is written in the transaction of the change that it tells of
    (`note_action`)."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    @writes
    def note(
        self,
        session: Session,
        action: str,
        subject: str,
        tenant: str = "",
        details: str = "",
        actor: str = "",
    ) -> None:
        """Adds a row about something that changes no other table."""
        now = int(self._clock())
        note_action(session, now, action, subject, tenant, details, actor)

    async def list(
        self, tenant: str | None = None, since: float = 0.0, limit: int = 1000
    ) -> Sequence[AuditRecord]:
        """The newest rows since a time (Unix seconds), of one tenant (its id) or of all, the oldest first."""
        wanted = [AuditRecord.time >= since]
        if tenant is not None:
            wanted.append(AuditRecord.tenant == tenant)
        found = select(AuditRecord).where(*wanted).order_by(AuditRecord.number.desc()).limit(limit)
        rows = await self._database.read(lambda session: tuple(session.scalars(found)))
        return rows[::-1]

    @writes
    def sweep(self, session: Session, before: float) -> bool:
        """Deletes some rows that are older, and the oldest of tenants with more than `MOST_AUDITED`; True
        where more may be left."""
        old = select(AuditRecord.number).where(AuditRecord.time < before)
        numbers = list(session.scalars(old.order_by(AuditRecord.number).limit(_TURN)))
        counts = select(AuditRecord.tenant, func.count()).group_by(AuditRecord.tenant)
        for tenant, count in session.execute(counts.having(func.count() > MOST_AUDITED)).all():
            own = select(AuditRecord.number).where(AuditRecord.tenant == tenant)
            excess = max(min(count - MOST_AUDITED, _TURN - len(numbers)), 0)
            numbers += session.scalars(own.order_by(AuditRecord.number).limit(excess))
        session.execute(delete(AuditRecord).where(AuditRecord.number.in_(numbers)))
        return len(numbers) >= _TURN


def note_action(
    session: Session, now: int, action: str, subject: str, tenant: str, details: str = "", actor: str = ""
) -> None:
    """Adds a row to a transaction; the actor is the given one, the tenant of the present request, or the
    operator."""
    work = context()
    session.add(
        AuditRecord(
            new_id("audit"),
            now,
            actor or work.tenant or SERVER,
            action,
            subject,
            tenant,
            work.key,
            work.address,
            work.request_id,
            details,
        )
    )
