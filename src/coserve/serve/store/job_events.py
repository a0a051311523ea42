"""Writes down what engines report about jobs, each piece once, however often it is told.

A piece is known by its engine's generation and its number, and the mark of how far an engine's news have
been taken moves in the same transaction as the rows they bring. A job that resumes repeats the steps since
its checkpoint: these replace the rows they wrote before.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coserve.core.job_status import JobStatus
from coserve.serve.store.adapters import add_adapter
from coserve.serve.store.database import Database
from coserve.serve.store.ids import new_id
from coserve.serve.store.jobs import add_event, fail_job, job_in
from coserve.serve.store.records import Adapter, CheckpointRecord, Event, File, JobRecord, NewsMark
from coserve.wire.messages import JobCheckpoint, JobNote, JobStarted, JobStep, JobWaiting

OfStep = TypeVar("OfStep", Event, CheckpointRecord)
_PACE: Final = 0.1  # weight of the newest step in the mean that predicts the end


class JobEventStore:
    """Takes news of jobs down. News of a job that is over, or that nobody knows, only move the mark."""

    def __init__(
        self, database: Database, clock: Callable[[], float], relative: Callable[[Path], Path]
    ) -> None:
        """`relative` makes paths as rows hold them."""
        self._database, self._clock, self._relative = database, clock, relative

    async def seen(self, mark: NewsMark) -> bool:
        """Tells whether this piece has been written down."""
        return await self._database.read(
            lambda session: _is_seen(session.get(NewsMark, mark.generation), mark)
        )

    async def forget_engines_before(self, generation: str) -> None:
        """Forgets the marks of all engines but this one: an engine never comes back once another answers."""
        old = delete(NewsMark).where(NewsMark.generation != generation)
        await self._database.write(lambda session: session.execute(old))

    async def skip(self, mark: NewsMark) -> None:
        """Passes over a piece that changes nothing."""
        await self._database.write(lambda session: _move(session, mark))

    async def waiting(self, mark: NewsMark, told: JobWaiting) -> None:
        """The job cannot begin yet."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            _change_status(job, JobStatus.RUNNING, JobStatus.QUEUED)
            add_event(session, job, now, f"Fine-tuning job {told.reason}")

        await self._take(mark, told.job, write)

    async def noted(self, mark: NewsMark, told: JobNote) -> None:
        """The job goes on, otherwise than it was asked for."""
        await self._take(
            mark, told.job, lambda session, job, now: add_event(session, job, now, told.text, "warn")
        )

    async def started(self, mark: NewsMark, told: JobStarted) -> None:
        """The job has begun, or goes on from a checkpoint."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            _change_status(job, JobStatus.QUEUED, JobStatus.RUNNING)
            job.step, job.steps, job.stepped = told.step, told.steps, self._clock()
            if told.step:
                add_event(session, job, now, f"Fine-tuning job resumed from step {told.step}")
                return
            add_event(session, job, now, f"Fine-tuning job started: {told.steps} steps")
            if lost := _lost(told):
                add_event(session, job, now, lost, "warn")

        await self._take(mark, told.job, write)

    async def stepped(self, mark: NewsMark, told: JobStep) -> None:
        """An optimizer step."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            event = _at(session, Event, told)
            if event is None:
                event = Event(new_id("ftevent"), job.id, now, "info", "", "metrics", step=told.step)
                session.add(event)
            elif event.data is not None:  # a step that is repeated
                job.trained_tokens -= event.data["tokens"]
            event.message, event.data = _line(told, job.steps), _figures(told, job.steps)
            job.step, job.stepped = told.step, self._clock()
            job.trained_tokens += told.tokens
            job.pace = told.seconds if job.pace is None else job.pace + _PACE * (told.seconds - job.pace)

        await self._take(mark, told.job, write)

    async def checkpointed(self, mark: NewsMark, told: JobCheckpoint) -> None:
        """A checkpoint is on disk; it can be sampled by its name from now on."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            path, losses = self._relative(Path(told.path)), _losses(told)
            _add_validation(session, told)
            known = _at(session, CheckpointRecord, told)
            if known is not None:  # an engine that goes on from it tells of it again
                known.path, known.digest, known.metrics = path, told.digest, losses
                return
            id, name = new_id("ftckpt"), f"{job.name}:ckpt-step-{told.step}"
            session.add(CheckpointRecord(id, job.id, told.step, name, path, told.digest, now, losses))
            add_event(session, job, now, f"Checkpoint created at step {told.step}: {name}")

        await self._take(mark, told.job, write)

    async def succeeded(self, mark: NewsMark, id: str, step: int, adapter: Adapter, result: File) -> None:
        """A job is done; its adapter and its result file are on disk and become visible with this."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            add_adapter(session, adapter)
            session.add(result)
            job.status, job.finished, job.result_file, job.step = JobStatus.SUCCEEDED, now, result.id, step
            add_event(session, job, now, f"New fine-tuned model created: {adapter.name}")
            add_event(session, job, now, "The job has successfully completed")

        await self._take(mark, id, write)

    async def failed(self, mark: NewsMark, id: str, error: dict[str, Any]) -> None:
        """A job cannot go on. `error` has a code, a message and a param, as OpenAI shows them."""
        await self._take(mark, id, lambda session, job, now: fail_job(session, job, now, error))

    async def stopped(self, mark: NewsMark, id: str) -> None:
        """A job left the engine and can go on: it waits again, unless it is paused."""
        await self._take(
            mark, id, lambda session, job, now: _change_status(job, JobStatus.RUNNING, JobStatus.QUEUED)
        )

    async def cancelled(self, mark: NewsMark, id: str) -> None:
        """A job has ended as cancelled; mostly the database knows that already."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            job.status, job.finished = JobStatus.CANCELLED, now

        await self._take(mark, id, write)

    async def _take(self, mark: NewsMark, id: str, work: Callable[[Session, JobRecord, int], None]) -> None:
        """Has `work` change the job, at a whole second, where the mark moves and the job is not over."""

        def write(session: Session) -> None:
            if _move(session, mark):
                job = job_in(session, id)
                if job is not None and not job.status.is_final:
                    work(session, job, int(self._clock()))

        await self._database.write(write)


def _change_status(job: JobRecord, before: JobStatus, after: JobStatus) -> None:
    """Changes a status, unless the job was asked for another one meanwhile."""
    if job.status == before:
        job.status = after


def _is_seen(known: NewsMark | None, mark: NewsMark) -> bool:
    return known is not None and mark.number <= known.number


def _move(session: Session, mark: NewsMark) -> bool:
    """Moves the mark to this piece; False if it was there before."""
    known = session.get(NewsMark, mark.generation)
    if _is_seen(known, mark):
        return False
    session.merge(mark)
    return True


def _at(session: Session, kind: type[OfStep], told: JobStep | JobCheckpoint) -> OfStep | None:
    """The row of one optimizer step of a job."""
    return session.scalar(select(kind).where(kind.job == told.job, kind.step == told.step))


def _add_validation(session: Session, told: JobCheckpoint) -> None:
    """Adds the validation loss, which is known some time after its step, to the step's figures."""
    event = None if told.validation_loss is None else _at(session, Event, told)
    if event is not None and event.data is not None:
        event.data = {**event.data, "valid_loss": _finite(told.validation_loss)}


def _lost(told: JobStarted) -> str | None:
    """A sentence about examples that were cut or dropped; None where all of the data is learned from."""
    parts = []
    if told.truncated:
        parts.append(f"{told.truncated} examples are longer than the model or max_length allows and were cut")
    if told.dropped:
        parts.append(f"{told.dropped} examples have nothing left to learn and were dropped")
    return "; ".join(parts) or None


def _line(told: JobStep, steps: int | None) -> str:
    total = f"/{steps}" if steps else ""
    validated = "" if told.validation_loss is None else f", validation loss={told.validation_loss:.4f}"
    return f"Step {told.step}{total}: training loss={told.loss:.4f}{validated}"


def _figures(told: JobStep, steps: int | None) -> dict[str, Any]:
    figures = {
        "step": told.step,
        "total_steps": steps,
        "train_loss": told.loss,
        "valid_loss": told.validation_loss,
        "learning_rate": told.learning_rate,
        "grad_norm": told.grad_norm,
        "labels": told.labels,
        "tokens": told.tokens,
        "seconds": told.seconds,
    }
    return {name: _finite(value) for name, value in figures.items()}


def _losses(told: JobCheckpoint) -> dict[str, Any]:
    losses = {"step": told.step, "train_loss": told.loss, "valid_loss": told.validation_loss}
    return {name: _finite(value) for name, value in losses.items() if value is not None}


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is None or math.isfinite(value) else None
