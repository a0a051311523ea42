"""Quarantine: what brought engines down, kept for the operator, and what is suspected, for the next API."""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coserve.serve.store.adapters import AdapterStore
from coserve.serve.store.database import Database, columns_of
from coserve.serve.store.ids import new_id
from coserve.serve.store.jobs import add_event, job_in
from coserve.serve.store.records import FINAL, QuarantineRecord
from coserve.serve.store.tables import jobs, quarantine, suspects

_FIELDS: Final = tuple(field.name for field in fields(QuarantineRecord))
Suspects = dict[tuple[str, str], tuple[int, int]]  # kind and subject: crashes, and progress


class QuarantineStore:
    """Requests, jobs, adapters and checks that are not tried again, and those on probation."""

    def __init__(self, database: Database, clock: Callable[[], float], adapters: AdapterStore) -> None:
        self._database, self._clock, self._adapters = database, clock, adapters

    async def list(self) -> tuple[QuarantineRecord, ...]:
        """Lists what is quarantined, the oldest first."""
        found = columns_of(quarantine, _FIELDS).order_by(quarantine.c.number)
        return await self._database.read(
            lambda connection: tuple(QuarantineRecord(**row) for row in connection.execute(found).mappings())
        )

    async def reason(self, kind: str, subject: str) -> str | None:
        """Reason that something is quarantined; None where it is not."""
        found = select(quarantine.c.reason).where(_is(kind, subject))
        return await self._database.read(lambda connection: connection.execute(found).scalar())

    async def add(self, kind: str, subject: str, reason: str, details: dict[str, Any] | None) -> None:
        """Puts something into quarantine; a job fails with it, and keeps what it could go on from."""
        adapter = await self._adapters.get(subject) if kind == "adapter" else None

        def write(connection: Connection) -> None:
            now = int(self._clock())
            tenant = None if adapter is None else adapter.tenant
            if kind == "job" and (job := job_in(connection, subject)) is not None:
                tenant = job.tenant
                if job.status not in FINAL:
                    error = {"code": "quarantined", "message": reason, "param": None}
                    values = {"status": "failed", "finished": now, "error": error}
                    connection.execute(update(jobs).where(jobs.c.id == subject).values(values))
                    add_event(connection, subject, now, f"The job failed: {reason}", "error")
            row = asdict(QuarantineRecord(new_id("quar"), kind, subject, reason, now, tenant, details))
            connection.execute(upsert(quarantine).values(row).on_conflict_do_nothing())

        await self._database.write(write)

    async def release(self, id: str) -> QuarantineRecord | None:
        """Takes something out of quarantine, by its id or its subject; None if there is no such thing.

        A job is paused then: whoever owns it lets it go on.
        """

        def write(connection: Connection) -> QuarantineRecord | None:
            named = (quarantine.c.id == id) | (quarantine.c.subject == id)
            row = connection.execute(columns_of(quarantine, _FIELDS).where(named)).mappings().first()
            if row is None:
                return None
            found = QuarantineRecord(**row)
            connection.execute(delete(quarantine).where(quarantine.c.id == found.id))
            at = (jobs.c.id == found.subject) & (jobs.c.status == "failed")
            if found.kind == "job":
                values = {"status": "paused", "finished": None, "error": None}
                if connection.execute(update(jobs).where(at).values(values)).rowcount:
                    now = int(self._clock())
                    add_event(connection, found.subject, now, "The job was released, and is paused")
            return found

        return await self._database.write(write)

    async def suspects(self) -> Suspects:
        """Lists what is on probation."""

        def read(connection: Connection) -> Suspects:
            rows = connection.execute(select(suspects))
            return {(row.kind, row.subject): (row.crashes, row.progress) for row in rows}

        return await self._database.read(read)

    async def suspect(self, found: Suspects) -> None:
        """Puts these, and no others, on probation."""
        rows = [
            {"kind": kind, "subject": subject, "crashes": crashes, "progress": progress}
            for (kind, subject), (crashes, progress) in found.items()
        ]

        def write(connection: Connection) -> None:
            connection.execute(delete(suspects))
            if rows:
                connection.execute(insert(suspects), rows)

        await self._database.write(write)


def _is(kind: str, subject: str) -> Any:
    return (quarantine.c.kind == kind) & (quarantine.c.subject == subject)
