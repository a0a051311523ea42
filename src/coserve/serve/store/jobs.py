"""Rows of fine-tuning jobs, their events and checkpoints, for the API."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from coserve.core.job_status import UNFINISHED, JobStatus
from coserve.errors import ConflictError
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, page_of
from coserve.serve.store.files import lasting
from coserve.serve.store.ids import new_id
from coserve.serve.store.labels import has_label, has_no_labels
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import CheckpointRecord, Event, File, JobRecord, Page


class JobStore:
    """Jobs by tenant. `JobEventStore` stores engines' events."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        quotas: Quotas,
        creations: CreationStore,
        leases: Leases,
    ) -> None:
        self._database, self._clock, self._quotas, self._creations = database, clock, quotas, creations
        self._leases = leases

    async def add(self, job: JobRecord, message: str) -> None:
        """Adds a job with its first event. Raises ConflictError if one of its files is missing, and
        QuotaExceeded."""
        read, note = {job.training_file, job.validation_file or job.training_file}, self._creations.noting()

        def write(session: Session) -> None:
            self._quotas.check_jobs(session, job.tenant)
            own = File.tenant == job.tenant, File.id.in_(read), lasting(self._clock())
            found = select(File.id).where(*own)
            if gone := read - set(session.scalars(found)):
                raise ConflictError(f"{min(gone)} was deleted or expired while the job was being created")
            session.add(job)
            session.flush()  # before the event that names it
            add_event(session, job, int(self._clock()), message)
            note(session, f"/v1/fine_tuning/jobs/{job.id}")
            self._quotas.check_kept(session, job.tenant)

        await self._database.write(write)

    async def get(self, tenant: str, id: str) -> JobRecord | None:
        """The tenant's job with this id."""
        found = select(JobRecord).where(JobRecord.tenant == tenant, JobRecord.id == id)
        return await self._database.read(lambda session: session.scalar(found))

    async def page(
        self, tenant: str, after: str | None, limit: int, labels: Mapping[str, str] | None = None
    ) -> Page[JobRecord] | None:
        """The tenant's jobs after the one with id `after`, the newest first; None if it has no such job.

        `labels` selects jobs with all of these pairs; an empty mapping those without any.
        """
        wanted: list[ColumnElement[bool]] = [JobRecord.tenant == tenant]
        if labels is not None and not labels:
            wanted.append(has_no_labels(JobRecord.labels))
        for key, value in (labels or {}).items():
            wanted.append(has_label(JobRecord.labels, key, value))
        return await self._database.read(lambda session: page_of(session, JobRecord, wanted, after, limit))

    async def events(self, job: str, after: str | None, limit: int) -> Page[Event] | None:
        """A job's events after the one with id `after`, the newest first; None if it has no such event."""
        wanted = (Event.job == job,)
        return await self._database.read(lambda session: page_of(session, Event, wanted, after, limit))

    async def checkpoints(self, job: str, after: str | None, limit: int) -> Page[CheckpointRecord] | None:
        """A job's checkpoints after the one with id `after`, the newest first; None if it has no such
        checkpoint."""
        wanted = (CheckpointRecord.job == job,)
        return await self._database.read(
            lambda session: page_of(session, CheckpointRecord, wanted, after, limit)
        )

    async def all_checkpoints(self, job: str) -> tuple[CheckpointRecord, ...]:
        """A job's checkpoints by their steps."""
        found = select(CheckpointRecord).where(CheckpointRecord.job == job).order_by(CheckpointRecord.step)
        return await self._database.read(lambda session: tuple(session.scalars(found)))

    async def metrics(self, job: str) -> tuple[dict[str, Any], ...]:
        """The figures of every optimizer step, in order."""
        found = select(Event.data).where(Event.job == job, Event.step.is_not(None)).order_by(Event.step)
        return await self._database.read(lambda session: tuple(filter(None, session.scalars(found))))

    async def unfinished(self) -> tuple[JobRecord, ...]:
        """All tenants' unfinished jobs, the oldest first. The query names their states, as SQLite would read
        all jobs to exclude the others."""
        found = select(JobRecord).where(JobRecord.status.in_(UNFINISHED)).order_by(JobRecord.number)
        return await self._database.read(lambda session: tuple(session.scalars(found)))

    async def check_room(self, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may have no more unfinished jobs."""
        await self._database.read(lambda session: self._quotas.check_jobs(session, tenant))

    async def note(self, id: str, message: str, level: str) -> None:
        """Adds a message to the events of a job of any tenant, also of one that is over."""

        def write(session: Session) -> None:
            if (job := job_in(session, id)) is not None:
                add_event(session, job, int(self._clock()), message, level)

        await self._database.write(write)

    async def take(self, job: str) -> JobRecord | None:
        """Makes this server the owner of a job that is queued or running, which then runs; returns it, None
        if it is neither or another server's."""

        def write(session: Session) -> tuple[JobRecord | None, int | None]:
            wanted = JobRecord.id == job, JobRecord.status.in_((JobStatus.QUEUED, JobStatus.RUNNING))
            found = session.scalar(select(JobRecord).where(*wanted))
            fence = None if found is None else self._leases.take(session, "job", job)
            if found is None or fence is None:
                return None, None
            found.status = JobStatus.RUNNING
            return found, fence

        found, fence = await self._database.write(write)
        return found if self._leases.note("job", job, fence) else None

    async def move(
        self, job: str, source: Collection[JobStatus], status: JobStatus, message: str | None = None
    ) -> JobRecord | None:
        """Changes a job's status if it is one of `source`; returns the changed job, None if it was in another
        status.

        `message` becomes an event. A final status ends the job now.
        """
        assert all(before.may_become(status) for before in source), f"no job becomes {status} so"

        def write(session: Session) -> JobRecord | None:
            found = session.scalar(select(JobRecord).where(JobRecord.id == job, JobRecord.status.in_(source)))
            if found is not None:
                now = int(self._clock())
                found.status = status
                found.finished = now if status.is_final else found.finished
                if message is not None:
                    add_event(session, found, now, message)
            return found

        return await self._database.write(write)


def job_in(session: Session, id: str) -> JobRecord | None:
    """The job with this id, of any tenant."""
    return session.scalar(select(JobRecord).where(JobRecord.id == id))


def add_event(session: Session, job: JobRecord, created: int, message: str, level: str = "info") -> None:
    """Adds a message to a job's events."""
    session.add(Event(new_id("ftevent"), job.id, created, level, message))


def fail_job(session: Session, job: JobRecord, now: int, error: dict[str, Any]) -> None:
    """Fails a job. `error` has a code, a message and a param, as in OpenAI's API."""
    job.status, job.finished, job.error = JobStatus.FAILED, now, error
    add_event(session, job, now, f"The job failed: {error['message']}", "error")
