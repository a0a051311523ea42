"""Rows of fine-tuning jobs, and the order in which they begin."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL, UNFINISHED, JobStatus
from coserve.errors import ConflictError
from coserve.serve.store.audit import note_action
from coserve.serve.store.creations import CreationStore
from coserve.serve.store.database import Database, owned, page_of, reads, writes
from coserve.serve.store.files import lasting
from coserve.serve.store.ids import new_id
from coserve.serve.store.labels import has_label, has_no_labels
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import Quotas
from coserve.serve.store.records import Event, File, JobRecord, Page

_ASKED_FOR: Final = (JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.CANCELLED)  # others are the server's doing


class JobStore:
    """Jobs by tenant. `JobEventStore` stores engines' events, and `JobHistory` reads them."""

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

    @writes
    def add(self, session: Session, job: JobRecord, message: str) -> None:
        """Adds a job with its first event. Raises ConflictError if one of its files is missing, and
        QuotaExceeded."""
        read = {job.training_file, job.validation_file or job.training_file}
        self._quotas.check_jobs(session, job.tenant)
        own = File.tenant == job.tenant, File.id.in_(read), lasting(self._clock())
        if gone := read - set(session.scalars(select(File.id).where(*own))):
            raise ConflictError(f"{min(gone)} was deleted or expired while the job was being created")
        session.add(job)
        session.flush()  # before the event that names it
        now = int(self._clock())
        add_event(session, job, now, message)
        note_action(session, now, "job.created", job.id, job.tenant, job.model)
        self._creations.note(session, f"/v1/fine_tuning/jobs/{job.id}")
        self._quotas.check_kept(session, job.tenant)

    @reads
    def get(self, session: Session, tenant: str, id: str) -> JobRecord | None:
        """The tenant's job with this id."""
        return owned(session, JobRecord, tenant, id)

    @reads
    def count_unfinished(self, session: Session, tenant: str) -> int:
        """Number of the tenant's jobs that are not over."""
        wanted = JobRecord.tenant == tenant, JobRecord.status.not_in(FINAL)
        return session.scalars(select(func.count()).select_from(JobRecord).where(*wanted)).one()

    @reads
    def of_any(self, session: Session, id: str) -> JobRecord | None:
        """The job with this id, of any tenant."""
        return job_in(session, id)

    @reads
    def page(
        self,
        session: Session,
        tenant: str,
        after: str | None,
        limit: int,
        labels: Mapping[str, str] | None = None,
        status: JobStatus | None = None,
    ) -> Page[JobRecord] | None:
        """The tenant's jobs after the one with id `after`, the newest first; None if it has no such job.

        `labels` selects jobs with all of these pairs; an empty mapping those without any. `status` selects
        those that have it.
        """
        own, wanted = [JobRecord.tenant == tenant], list[ColumnElement[bool]]()
        if status is not None:
            wanted.append(JobRecord.status == status)
        if labels is not None and not labels:
            wanted.append(has_no_labels(JobRecord.labels))
        for key, value in (labels or {}).items():
            wanted.append(has_label(JobRecord.labels, key, value))
        return page_of(session, JobRecord, own, after, limit, filters=wanted)

    @reads
    def unfinished(self, session: Session) -> tuple[JobRecord, ...]:
        """All tenants' unfinished jobs in the order in which they begin: that of their creation, unless a
        tenant changed it. The query names their states: SQLite would read all jobs to exclude the others."""
        found = select(JobRecord).where(JobRecord.status.in_(UNFINISHED)).order_by(_ORDER, JobRecord.number)
        return tuple(session.scalars(found))

    @reads
    def check_room(self, session: Session, tenant: str) -> None:
        """Raises QuotaExceeded where the tenant may have no more unfinished jobs."""
        self._quotas.check_jobs(session, tenant)

    @writes
    def note(self, session: Session, id: str, message: str, level: str) -> None:
        """Adds a message to the events of a job of any tenant, also of one that is over."""
        if (job := job_in(session, id)) is not None:
            add_event(session, job, int(self._clock()), message, level)

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

    @writes
    def move(
        self,
        session: Session,
        job: str,
        source: Collection[JobStatus],
        status: JobStatus,
        message: str | None = None,
    ) -> JobRecord | None:
        """Changes a job's status if it is one of `source`; returns the changed job, None if it was in another
        status.

        `message` becomes an event. A final status ends the job now.
        """
        assert all(before.may_become(status) for before in source), f"no job becomes {status} so"
        found = session.scalar(select(JobRecord).where(JobRecord.id == job, JobRecord.status.in_(source)))
        if found is not None:
            now = int(self._clock())
            found.status, found.saving = status, False
            found.finished = now if status.is_final else found.finished
            if message is not None:
                add_event(session, found, now, message)
            if status in _ASKED_FOR:
                note_action(session, now, f"job.{status}", found.id, found.tenant)
        return found

    @writes
    def ask_to_save(self, session: Session, job: str, message: str) -> JobRecord | None:
        """Pauses an unfinished job that has made a step, to end with what it has learnt; None for others.
        `message` becomes an event, unless the job was asked before."""
        wanted = JobRecord.id == job, JobRecord.status.in_(UNFINISHED), JobRecord.step > 0
        found = session.scalar(select(JobRecord).where(*wanted))
        if found is not None and not found.saving:
            found.status, found.saving = JobStatus.PAUSED, True
            add_event(session, found, int(self._clock()), message)
        return found

    @reads
    def users(self, session: Session, adapters: Sequence[str], tenant: str) -> dict[str, list[str]]:
        """The tenant's unfinished jobs that begin with or learn from each of some adapters, by its id."""
        teacher = JobRecord.options["teacher"].as_string()
        wanted = or_(JobRecord.start_from.in_(adapters), teacher.in_(adapters))
        found = select(JobRecord.id, JobRecord.start_from, teacher).where(
            JobRecord.tenant == tenant, JobRecord.status.in_(UNFINISHED), wanted
        )
        users: dict[str, list[str]] = {}
        for job, *used in session.execute(found):
            for adapter in filter(None, used):
                users.setdefault(adapter, []).append(job)
        return users

    @reads
    def queue(self, session: Session, tenant: str) -> tuple[JobRecord, ...]:
        """The tenant's queued jobs in the order in which they begin."""
        return tuple(session.scalars(_queued(tenant)))

    @writes
    def reorder(self, session: Session, tenant: str, job: str, before: str | None) -> bool:
        """Lets a queued job of the tenant begin before another one, or after all others where that is None.
        False if either is not queued.

        The tenant's jobs share their own places anew, so the order among tenants is as before.
        """
        jobs = {one.id: one for one in session.scalars(_queued(tenant))}
        if job not in jobs or before == job or (before is not None and before not in jobs):
            return job in jobs and before == job
        places = [one.number if one.place is None else one.place for one in jobs.values()]
        order = [id for id in jobs if id != job]
        order.insert(len(order) if before is None else order.index(before), job)
        for id, place in zip(order, places, strict=True):
            jobs[id].place = place
        return True


_ORDER: Final = func.coalesce(JobRecord.place, JobRecord.number)


def _queued(tenant: str) -> Select[JobRecord]:
    wanted = JobRecord.tenant == tenant, JobRecord.status == JobStatus.QUEUED
    return select(JobRecord).where(*wanted).order_by(_ORDER, JobRecord.number)


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
