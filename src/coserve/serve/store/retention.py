"""Ends records by their age: those of work that is over, which nobody can delete."""

from pathlib import Path
from typing import Final

from sqlalchemy import ColumnElement, and_, delete, func, or_, select
from sqlalchemy.orm import Session

from coserve.core.job_status import FINAL
from coserve.serve.artifacts.local import ArtifactStore
from coserve.serve.store.database import Database
from coserve.serve.store.records import (
    Adapter,
    BatchRecord,
    CheckpointRecord,
    Event,
    JobRecord,
    LeaseRecord,
    QuarantineRecord,
    Record,
    TinkerCheckpoint,
    TinkerRequest,
    TinkerRun,
    TinkerSampler,
    TinkerSession,
    TinkerState,
    UploadRecord,
)
from coserve.serve.store.tinker import LEASED

MOST: Final = 500  # rows that one turn deletes: the writing thread is shared


class RetentionStore:
    """Deletes old records, a bounded number at a time."""

    def __init__(self, database: Database, jobs: Path, artifacts: ArtifactStore) -> None:
        """`jobs` is the folder of jobs' checkpoints."""
        self._database, self._jobs, self._artifacts = database, jobs, artifacts

    async def sweep(self, before: float) -> bool:
        """Deletes some of what ended before this time (Unix seconds): jobs of which there is no model, with
        their events and checkpoints; `tinker` sessions without use since then, with samplers and runs, but
        for runs that have checkpoints; logs of runs that nobody has had since then; batches; uploads; and
        quarantine. True where more may be left."""
        turn = _Turn(int(before), MOST)
        folders = await self._database.write(turn.sweep)
        for folder in folders:
            await self._artifacts.discard(self._jobs.parent / folder)
        return turn.left <= 0


class _Turn:
    """One turn, which deletes `left` more rows at most."""

    def __init__(self, before: int, left: int) -> None:
        self._before, self.left = before, left

    def sweep(self, session: Session) -> list[Path]:
        """Deletes rows; returns paths of folders that may go."""
        self._delete(session, QuarantineRecord, QuarantineRecord.created <= self._before)
        self._delete(session, BatchRecord, BatchRecord.ended <= self._before)
        over = UploadRecord.status != "pending", UploadRecord.created <= self._before
        self._delete(session, UploadRecord, and_(*over))
        gone = [Path("jobs") / job for job in self._jobs(session)]
        self._sessions(session)
        return gone + self._logs(session)

    def _jobs(self, session: Session) -> list[str]:
        has_model = select(Adapter.id).where(Adapter.job == JobRecord.id).exists()
        is_old = JobRecord.finished.is_not(None) & (JobRecord.finished <= self._before)
        over = select(JobRecord.id).where(JobRecord.status.in_(FINAL), is_old, ~has_model)
        gone = []
        for job in session.scalars(over.order_by(JobRecord.number).limit(self.left)).all():
            for kind, wanted in (
                (Event, Event.job == job),
                (CheckpointRecord, CheckpointRecord.job == job),
                (JobRecord, JobRecord.id == job),
            ):
                self._delete(session, kind, wanted)
            if self.left < 0:
                break
            gone.append(job)
        return gone

    def _sessions(self, session: Session) -> None:
        # A session is in use as long as one of its runs or samplers is.
        runs = select(func.max(TinkerRun.used)).where(TinkerRun.session == TinkerSession.id)
        samplers = select(func.max(TinkerSampler.created)).where(TinkerSampler.session == TinkerSession.id)
        old: list[ColumnElement[bool]] = [TinkerSession.created <= self._before]
        for last in (runs.scalar_subquery(), samplers.scalar_subquery()):
            old.append(or_(last.is_(None), last <= self._before))
        of_session = TinkerRun.session == TinkerSession.id
        is_saved = select(TinkerCheckpoint.id).where(TinkerCheckpoint.run == TinkerRun.id).exists()
        has_saved = select(TinkerRun.id).where(of_session, is_saved).exists()
        has_unsaved = select(TinkerRun.id).where(of_session, ~is_saved).exists()
        has_samplers = select(TinkerSampler.id).where(TinkerSampler.session == TinkerSession.id).exists()
        # Others stay, and would be found by every turn before younger ones.
        old.append(has_samplers | has_unsaved | ~has_saved)
        unused = select(TinkerSession.id).where(*old).order_by(TinkerSession.number)
        names = session.scalars(unused.limit(max(self.left, 0))).all()
        self._delete(session, TinkerSampler, TinkerSampler.session.in_(names))
        self._delete(session, TinkerRun, TinkerRun.session.in_(names) & ~is_saved)
        is_empty = ~has_samplers & ~has_saved & ~has_unsaved
        self._delete(session, TinkerSession, TinkerSession.id.in_(names) & is_empty)

    def _logs(self, session: Session) -> list[Path]:
        """Logs of runs whose server is gone, and whose clients have not asked another one."""
        run = TinkerRequest.run
        is_had = select(LeaseRecord.subject).where(
            LeaseRecord.kind == LEASED, LeaseRecord.subject == run, LeaseRecord.expires > self._before
        )
        is_used = select(TinkerRun.id).where(TinkerRun.id == run, TinkerRun.used > self._before)
        old = select(run).where(~is_had.exists(), ~is_used.exists()).distinct().limit(1)
        runs = session.scalars(old).all()
        states = session.scalars(select(TinkerState.path).where(TinkerState.run.in_(runs))).all()
        session.execute(delete(TinkerState).where(TinkerState.run.in_(runs)))
        session.execute(delete(TinkerRequest).where(TinkerRequest.run.in_(runs)))
        return list(states)

    def _delete(self, session: Session, kind: type[Record], wanted: ColumnElement[bool]) -> None:
        """Deletes the oldest rows that are wanted, as many as this turn may."""
        if self.left <= 0:
            self.left = -1  # some may be left
            return
        found = select(kind.number).where(wanted).order_by(kind.number).limit(self.left)
        numbers = session.scalars(found).all()
        session.execute(delete(kind).where(kind.number.in_(numbers)))
        self.left -= len(numbers)
