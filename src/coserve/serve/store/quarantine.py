"""Quarantine: work that crashed engines, for the operator, and suspects, for the next API process."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from coserve.core.job_status import JobStatus
from coserve.serve.store.adapters import AdapterStore
from coserve.serve.store.audit import note_action
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.ids import new_id
from coserve.serve.store.jobs import add_event, fail_job, job_in
from coserve.serve.store.leases import Leases
from coserve.serve.store.records import QuarantineRecord, SuspectRecord, TinkerRun

Suspects = dict[tuple[str, str], tuple[int, int]]  # kind and subject: crashes, and progress


class QuarantineStore:
    """Requests, jobs, training sessions, adapters and checks in quarantine, and those on probation."""

    def __init__(
        self, database: Database, clock: Callable[[], float], adapters: AdapterStore, leases: Leases
    ) -> None:
        self._database, self._clock, self._adapters, self._leases = database, clock, adapters, leases

    @reads
    def list(self, session: Session) -> tuple[QuarantineRecord, ...]:
        """Quarantined work, the oldest first."""
        return tuple(session.scalars(select(QuarantineRecord).order_by(QuarantineRecord.number)))

    @reads
    def reason(self, session: Session, kind: str, subject: str) -> str | None:
        """The reason of a quarantine; None where there is none."""
        return _reason(session, kind, subject)

    async def add(self, kind: str, subject: str, reason: str, details: dict[str, Any] | None) -> None:
        """Adds a quarantine entry; a job fails with it, and keeps its state for resuming."""
        adapter = await self._adapters.get(subject) if kind == "adapter" else None

        def write(session: Session) -> None:
            now = int(self._clock())
            tenant = None if adapter is None else adapter.tenant
            if kind == "job" and (job := job_in(session, subject)) is not None:
                tenant = job.tenant
                if not job.status.is_final and self._leases.holds(session, "job", subject):
                    fail_job(session, job, now, {"code": "quarantined", "message": reason, "param": None})
            elif kind == "session":
                tenant = session.scalar(select(TinkerRun.tenant).where(TinkerRun.id == subject))
            if _reason(session, kind, subject) is None:
                session.add(QuarantineRecord(new_id("quar"), kind, subject, reason, now, tenant, details))

        await self._database.write(write)

    @writes
    def release(self, session: Session, id: str) -> QuarantineRecord | None:
        """Removes an entry, by its id or its subject, and returns it; None if there is none.

        A job is then paused, for its owner to resume.
        """
        named = (QuarantineRecord.id == id) | (QuarantineRecord.subject == id)
        found = session.scalars(select(QuarantineRecord).where(named)).first()
        if found is None:
            return None
        session.delete(found)
        note_action(session, int(self._clock()), "quarantine.released", found.subject, found.tenant or "")
        job = job_in(session, found.subject) if found.kind == "job" else None
        if job is not None and job.status == JobStatus.FAILED:
            job.status, job.finished, job.error = JobStatus.PAUSED, None, None
            add_event(session, job, int(self._clock()), "The job was released, and is paused")
        return found

    @reads
    def suspects(self, session: Session) -> Suspects:
        """Work on probation, of this server's engines."""
        rows = session.scalars(select(SuspectRecord).where(self._own_suspects))
        return {(row.kind, row.subject): (row.crashes, row.progress) for row in rows}

    @writes
    def suspect(self, session: Session, suspects: Suspects) -> None:
        """Replaces this server's set of suspects."""
        session.execute(delete(SuspectRecord).where(self._own_suspects))
        session.add_all(SuspectRecord(self._leases.owner, *item, *seen) for item, seen in suspects.items())

    @property
    def _own_suspects(self) -> ColumnElement[bool]:
        return SuspectRecord.owner.in_((self._leases.owner, ""))  # "": before servers had names


def _reason(session: Session, kind: str, subject: str) -> str | None:
    named = (QuarantineRecord.kind == kind, QuarantineRecord.subject == subject)
    return session.scalar(select(QuarantineRecord.reason).where(*named))
