"""Rows of fine-tuning jobs, their events and checkpoints, as callers see and change them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, Select, func, insert, or_, select, update

from coserve.core.job_status import UNFINISHED, JobStatus
from coserve.errors import ConflictError
from coserve.serve.store.database import Database, columns_of, page_of
from coserve.serve.store.ids import new_id
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import CheckpointRecord, Event, JobRecord, Page
from coserve.serve.store.tables import checkpoints, events, files, jobs

_JOB: Final = tuple(field.name for field in fields(JobRecord))
_EVENT: Final = tuple(field.name for field in fields(Event))
_CHECKPOINT: Final = tuple(field.name for field in fields(CheckpointRecord))


class JobStore:
    """Jobs by tenant. What engines report about them comes in through `NewsStore`."""

    def __init__(self, database: Database, clock: Callable[[], float], folder: Path, quotas: Quotas) -> None:
        self._database, self._clock, self._folder, self._quotas = database, clock, folder, quotas

    async def add(self, job: JobRecord, message: str) -> None:
        """Acknowledges a job, with its first event. Raises ConflictError if a file of it is gone, and
        QuotaExceeded where its owner has too many."""
        read = {job.training_file, job.validation_file or job.training_file}

        def write(connection: Connection) -> None:
            self._quotas.check_jobs(connection, job.tenant)
            found = select(files.c.id).where(files.c.tenant == job.tenant, files.c.id.in_(read))
            if gone := read - set(connection.execute(found).scalars()):
                raise ConflictError(f"{min(gone)} was deleted while the job was being created")
            connection.execute(insert(jobs).values(asdict(job)))
            add_event(connection, job.id, int(self._clock()), message)

        await self._database.write(write)

    async def get(self, tenant: str, id: str) -> JobRecord | None:
        """The tenant's job with this id."""
        found = columns_of(jobs, _JOB).where(jobs.c.tenant == tenant, jobs.c.id == id)
        return await self._database.read(lambda connection: _first(connection, found))

    async def page(
        self, tenant: str, after: str | None, limit: int, metadata: Mapping[str, str] | None = None
    ) -> Page[JobRecord] | None:
        """The tenant's jobs from behind `after`, the newest first; None if it has no such job.

        With `metadata` only those that carry all of these pairs; an empty one means those without any.
        """
        query = columns_of(jobs, _JOB).where(jobs.c.tenant == tenant)
        if metadata is not None and not metadata:
            query = query.where(or_(jobs.c.metadata.is_(None), func.json(jobs.c.metadata) == "{}"))
        for key, value in (metadata or {}).items():
            pairs = func.json_each(jobs.c.metadata).table_valued("key", "value")
            query = query.where(
                select(pairs.c.key).where(pairs.c.key == key, pairs.c.value == value).exists()
            )
        return await self._database.read(
            lambda connection: page_of(connection, query, jobs, _job, after, limit)
        )

    async def events(self, job: str, after: str | None, limit: int) -> Page[Event] | None:
        """A job's events from behind `after`, the newest first; None if it has no such event."""
        query = columns_of(events, _EVENT).where(events.c.job == job)
        return await self._database.read(
            lambda connection: page_of(connection, query, events, _event, after, limit)
        )

    async def checkpoints(self, job: str, after: str | None, limit: int) -> Page[CheckpointRecord] | None:
        """A job's checkpoints from behind `after`, the newest first; None if it has no such checkpoint."""
        query = _checkpoints_of(job)
        return await self._database.read(
            lambda connection: page_of(connection, query, checkpoints, self._checkpoint, after, limit)
        )

    async def all_checkpoints(self, job: str) -> tuple[CheckpointRecord, ...]:
        """A job's checkpoints by their steps."""
        query = _checkpoints_of(job).order_by(checkpoints.c.step)
        return await self._database.read(
            lambda connection: tuple(map(self._checkpoint, connection.execute(query).mappings()))
        )

    async def metrics(self, job: str) -> tuple[dict[str, Any], ...]:
        """The figures of every optimizer step, in order."""
        found = select(events.c.data).where(events.c.job == job, events.c.step.is_not(None))
        in_order = found.order_by(events.c.step)
        return await self._database.read(lambda c: tuple(c.execute(in_order).scalars()))

    async def unfinished(self) -> tuple[JobRecord, ...]:
        """Everybody's jobs that may still go on, the oldest first. SQLite looks up states that are named in
        their index; to exclude the others it would read all jobs there ever were."""
        found = columns_of(jobs, _JOB).where(jobs.c.status.in_(UNFINISHED)).order_by(jobs.c.number)
        return await self._database.read(lambda c: tuple(_job(row) for row in c.execute(found).mappings()))

    async def check_room(self, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may have no more jobs that are not over."""
        await self._database.read(lambda connection: self._quotas.check_jobs(connection, tenant))

    async def move(
        self, job: str, source: Collection[JobStatus], status: JobStatus, message: str | None = None
    ) -> JobRecord | None:
        """Changes a job's status if it is one of `source`; the job as it is then, None if it was not.

        `message` becomes an event. A final status ends the job now.
        """
        values: dict[str, Any] = {"status": status}
        assert all(before.may_become(status) for before in source), f"no job becomes {status} so"
        if status.is_final:
            values["finished"] = int(self._clock())
        change = update(jobs).where(jobs.c.id == job, jobs.c.status.in_(source)).values(values)

        def write(connection: Connection) -> JobRecord | None:
            if connection.execute(change).rowcount == 0:
                return None
            if message is not None:
                add_event(connection, job, int(self._clock()), message)
            return job_in(connection, job)

        return await self._database.write(write)

    def _checkpoint(self, row: RowMapping) -> CheckpointRecord:
        return CheckpointRecord(**{**row, "path": self._folder / row["path"]})


def _checkpoints_of(job: str) -> Select[Any]:
    return columns_of(checkpoints, _CHECKPOINT).where(checkpoints.c.job == job)


def job_in(connection: Connection, id: str) -> JobRecord | None:
    """The job with this id, whoever owns it."""
    return _first(connection, columns_of(jobs, _JOB).where(jobs.c.id == id))


def add_event(connection: Connection, job: str, created: int, message: str, level: str = "info") -> None:
    """Adds a message to a job's events."""
    event = Event(new_id("ftevent"), job, created, level, message, "message")
    connection.execute(insert(events).values(asdict(event)))


def _first(connection: Connection, found: Select[Any]) -> JobRecord | None:
    row = connection.execute(found).mappings().first()
    return None if row is None else _job(row)


def _job(row: RowMapping) -> JobRecord:
    return JobRecord(**{**row, "status": JobStatus(row["status"])})


def _event(row: RowMapping) -> Event:
    return Event(**row)
