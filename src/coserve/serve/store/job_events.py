"""Writes down what engines report about jobs, each piece once, however often it is told.

A piece is known by its engine's generation and its number, and the mark of how far an engine's news have
been taken moves in the same transaction as the rows they bring. A job that resumes repeats the steps since
its checkpoint: these replace the rows they wrote before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from coserve.core.job_status import JobStatus
from coserve.serve.store.adapters import insert_adapter, relative
from coserve.serve.store.database import Database
from coserve.serve.store.files import insert_file
from coserve.serve.store.ids import new_id
from coserve.serve.store.jobs import add_event, job_in
from coserve.serve.store.records import Adapter, File, JobRecord
from coserve.serve.store.tables import checkpoints, events, jobs, news
from coserve.wire.messages import JobCheckpoint, JobNote, JobStarted, JobStep, JobWaiting

_PACE: Final = 0.1  # weight of the newest step in the mean that predicts the end


@dataclass(frozen=True, slots=True)
class Mark:
    """One piece of news: the engine that told it, and its number there."""

    generation: str
    number: int


class JobEventStore:
    """Takes news of jobs down. News of a job that is over, or that nobody knows, only move the mark."""

    def __init__(self, database: Database, clock: Callable[[], float], folder: Path) -> None:
        self._database, self._clock, self._folder = database, clock, folder

    async def seen(self, mark: Mark) -> bool:
        """Tells whether this piece has been written down."""
        found = select(news.c.number).where(news.c.generation == mark.generation)
        number = await self._database.read(lambda connection: connection.execute(found).scalar())
        return number is not None and mark.number <= number

    async def forget_engines_before(self, generation: str) -> None:
        """An engine is gone for good once another one answers."""
        old = delete(news).where(news.c.generation != generation)
        await self._database.write(lambda connection: connection.execute(old))

    async def skip(self, mark: Mark) -> None:
        """Passes over a piece that changes nothing."""
        await self._database.write(lambda connection: _move(connection, mark))

    async def waiting(self, mark: Mark, told: JobWaiting) -> None:
        """The job cannot begin yet."""

        def write(connection: Connection, job: JobRecord) -> None:
            _change_status(connection, job, JobStatus.RUNNING, JobStatus.QUEUED)
            add_event(connection, job.id, int(self._clock()), f"Fine-tuning job {told.reason}")

        await self._take(mark, told.job, write)

    async def noted(self, mark: Mark, told: JobNote) -> None:
        """The job goes on, otherwise than it was asked for."""

        def write(connection: Connection, job: JobRecord) -> None:
            add_event(connection, job.id, int(self._clock()), told.text, "warn")

        await self._take(mark, told.job, write)

    async def started(self, mark: Mark, told: JobStarted) -> None:
        """The job has begun, or goes on from a checkpoint."""

        def write(connection: Connection, job: JobRecord) -> None:
            _change_status(connection, job, JobStatus.QUEUED, JobStatus.RUNNING)
            values = {"step": told.step, "steps": told.steps, "stepped": self._clock()}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))
            now = int(self._clock())
            if told.step:
                add_event(connection, job.id, now, f"Fine-tuning job resumed from step {told.step}")
                return
            add_event(connection, job.id, now, f"Fine-tuning job started: {told.steps} steps")
            if lost := _lost(told):
                add_event(connection, job.id, now, lost, "warn")

        await self._take(mark, told.job, write)

    async def stepped(self, mark: Mark, told: JobStep) -> None:
        """An optimizer step."""

        def write(connection: Connection, job: JobRecord) -> None:
            at = (events.c.job == job.id) & (events.c.step == told.step)
            before = connection.execute(select(events.c.data).where(at)).scalar()
            repeated = before["tokens"] if before else 0
            pace = told.seconds if job.pace is None else job.pace + _PACE * (told.seconds - job.pace)
            values = {
                "step": told.step,
                "trained_tokens": job.trained_tokens + told.tokens - repeated,
                "pace": pace,
                "stepped": self._clock(),
            }
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))
            figures = {"message": _line(told, job.steps), "data": _figures(told, job.steps)}
            if before is not None:
                connection.execute(update(events).where(at).values(figures))
                return
            row = {"id": new_id("ftevent"), "job": job.id, "created": int(self._clock()), "step": told.step}
            connection.execute(insert(events).values({**row, **figures, "level": "info", "type": "metrics"}))

        await self._take(mark, told.job, write)

    async def checkpointed(self, mark: Mark, told: JobCheckpoint) -> None:
        """A checkpoint is on disk; it can be sampled by its name from now on."""

        def write(connection: Connection, job: JobRecord) -> None:
            name, now = f"{job.name}:ckpt-step-{told.step}", int(self._clock())
            contents = {
                "path": relative(Path(told.path), self._folder),
                "digest": told.digest,
                "metrics": _losses(told),
            }
            row = {"id": new_id("ftckpt"), "job": job.id, "step": told.step, "name": name, "created": now}
            _add_validation(connection, told)
            at = (checkpoints.c.job == job.id) & (checkpoints.c.step == told.step)
            if connection.execute(update(checkpoints).where(at).values(contents)).rowcount:
                return  # an engine that goes on from it tells of it again
            connection.execute(insert(checkpoints).values({**row, **contents}))
            add_event(connection, job.id, now, f"Checkpoint created at step {told.step}: {name}")

        await self._take(mark, told.job, write)

    async def succeeded(self, mark: Mark, id: str, step: int, adapter: Adapter, result: File) -> None:
        """A job is done; its adapter and its result file are on disk and become visible with this."""

        def write(connection: Connection, job: JobRecord) -> None:
            now = int(self._clock())
            insert_adapter(connection, adapter, self._folder)
            insert_file(connection, result)
            values = {"status": JobStatus.SUCCEEDED, "finished": now, "result_file": result.id, "step": step}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))
            add_event(connection, job.id, now, f"New fine-tuned model created: {adapter.name}")
            add_event(connection, job.id, now, "The job has successfully completed")

        await self._take(mark, id, write)

    async def failed(self, mark: Mark, id: str, error: dict[str, Any]) -> None:
        """A job cannot go on. `error` has a code, a message and a param, as OpenAI shows them."""

        def write(connection: Connection, job: JobRecord) -> None:
            now = int(self._clock())
            values = {"status": JobStatus.FAILED, "finished": now, "error": error}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))
            add_event(connection, job.id, now, f"The job failed: {error['message']}", "error")

        await self._take(mark, id, write)

    async def stopped(self, mark: Mark, id: str) -> None:
        """A job left the engine and can go on: it waits again, unless it is paused."""

        def write(connection: Connection, job: JobRecord) -> None:
            _change_status(connection, job, JobStatus.RUNNING, JobStatus.QUEUED)

        await self._take(mark, id, write)

    async def cancelled(self, mark: Mark, id: str) -> None:
        """A job was ended for good; mostly that is known already."""

        def write(connection: Connection, job: JobRecord) -> None:
            values = {"status": JobStatus.CANCELLED, "finished": int(self._clock())}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(values))

        await self._take(mark, id, write)

    async def _take(self, mark: Mark, id: str, work: Callable[[Connection, JobRecord], None]) -> None:
        def write(connection: Connection) -> None:
            if not _move(connection, mark):
                return
            job = job_in(connection, id)
            if job is not None and not job.status.is_final:
                work(connection, job)

        await self._database.write(write)


def _change_status(connection: Connection, job: JobRecord, before: JobStatus, after: JobStatus) -> None:
    """Unless it was asked to be something else meanwhile."""
    at = (jobs.c.id == job.id) & (jobs.c.status == before)
    connection.execute(update(jobs).where(at).values(status=after))


def _move(connection: Connection, mark: Mark) -> bool:
    """Moves the mark to this piece; False if it was there before."""
    number = select(news.c.number).where(news.c.generation == mark.generation)
    before = connection.execute(number).scalar()
    if before is not None and mark.number <= before:
        return False
    values = {"generation": mark.generation, "number": mark.number}
    moved = upsert(news).values(values)
    connection.execute(
        moved.on_conflict_do_update(index_elements=["generation"], set_={"number": mark.number})
    )
    return True


def _add_validation(connection: Connection, told: JobCheckpoint) -> None:
    """The validation loss is known some time after its step: the step's figures get it now."""
    if told.validation_loss is None:
        return
    at = (events.c.job == told.job) & (events.c.step == told.step)
    figures = connection.execute(select(events.c.data).where(at)).scalar()
    if figures is not None:
        known = {**figures, "valid_loss": _finite(told.validation_loss)}
        connection.execute(update(events).where(at).values(data=known))


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
