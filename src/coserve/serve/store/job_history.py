"""Stored events, checkpoints and figures of jobs, as engines have told them."""

from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from coserve.serve.store.database import Database, page_of, reads
from coserve.serve.store.records import CheckpointRecord, Event, Page


class JobHistory:
    """Reads what engines have told of a job, by the job's id; `JobEventStore` writes it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @reads
    def events(self, session: Session, job: str, after: str | None, limit: int) -> Page[Event] | None:
        """A job's events after the one with id `after`, the newest first; None if it has no such event."""
        wanted = (Event.job == job,)
        return page_of(session, Event, wanted, after, limit)

    @reads
    def checkpoints(
        self, session: Session, job: str, after: str | None, limit: int
    ) -> Page[CheckpointRecord] | None:
        """A job's checkpoints after the one with id `after`, the newest first; None if it has no such
        checkpoint."""
        wanted = (CheckpointRecord.job == job,)
        return page_of(session, CheckpointRecord, wanted, after, limit)

    @reads
    def all_checkpoints(self, session: Session, job: str) -> tuple[CheckpointRecord, ...]:
        """A job's checkpoints by their steps."""
        found = select(CheckpointRecord).where(CheckpointRecord.job == job).order_by(CheckpointRecord.step)
        return tuple(session.scalars(found))

    @reads
    def metrics(self, session: Session, job: str) -> tuple[dict[str, Any], ...]:
        """The figures of every optimizer step, in order."""
        found = select(Event.data).where(Event.job == job, Event.step.is_not(None)).order_by(Event.step)
        return tuple(filter(None, session.scalars(found)))

    @reads
    def figures(self, session: Session, job: str, after: int, most: int) -> tuple[dict[str, Any], ...]:
        """The figures of a job's optimizer steps after `after`, in order: all, or where these are more than
        `most`, which is two or more, some at equal distances and the last."""
        own = Event.job == job, Event.step > after
        first, last = session.execute(select(func.min(Event.step), func.max(Event.step)).where(*own)).one()
        if first is None or last is None:
            return ()
        stride = max(1, -(-(last - first) // (most - 1)))
        kept = or_((Event.step - first) % stride == 0, Event.step == last)
        rows = session.execute(
            select(Event.step, Event.created, Event.data).where(*own, kept).order_by(Event.step)
        )
        return tuple({**(data or {}), "step": step, "created_at": at} for step, at, data in rows)
