"""Stores engines' job events, each exactly once, and only the job's owner's.

An event is identified by its engine's generation and its number; the mark of the last stored event moves in
the same transaction as the event's rows. A resumed job repeats the steps since its checkpoint, which replace
the earlier rows.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coserve.core import job_words
from coserve.core.job_status import JobStatus
from coserve.core.training import ACCURACY
from coserve.serve.store.adapters import add_adapter
from coserve.serve.store.database import Database, reads, writes
from coserve.serve.store.durable import RESUMING
from coserve.serve.store.ids import new_id
from coserve.serve.store.jobs import add_event, fail_job, job_in
from coserve.serve.store.leases import Leases
from coserve.serve.store.quotas import bytes_in
from coserve.serve.store.records import Adapter, CheckpointRecord, Event, File, JobRecord, NewsMark
from coserve.serve.store.usage import note_trained
from coserve.wire.messages import JobCheckpoint, JobStarted, JobStep, JobWaiting

OfStep = TypeVar("OfStep", Event, CheckpointRecord)
_TRAINED: Final = {ACCURACY: f"train_{ACCURACY}"}  # figures of a step by OpenAI's names
_OF_ALL: Final = ("valid_loss", f"valid_{ACCURACY}")
_PACE: Final = 0.1  # weight of the newest step in the mean that predicts the end


class JobEventStore:
    """Stores job events. Those of a finished or unknown job only move the mark."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        relative: Callable[[Path], Path],
        leases: Leases,
    ) -> None:
        """`relative` makes paths relative to the state folder."""
        self._database, self._clock, self._relative, self._leases = database, clock, relative, leases

    @reads
    def seen(self, session: Session, mark: NewsMark) -> bool:
        """Tells whether this event is stored."""
        return _is_seen(session.get(NewsMark, mark.generation), mark)

    @writes
    def forget_engines_before(self, session: Session, generation: str) -> None:
        """Removes the marks of this server's earlier engines, which never return once a later one has
        connected."""
        own = NewsMark.owner.in_((self._leases.owner, ""))
        session.execute(delete(NewsMark).where(NewsMark.generation != generation, own))

    @writes
    def skip(self, session: Session, mark: NewsMark) -> None:
        """Marks an event without effect as stored."""
        self._move(session, mark)

    async def waiting(self, mark: NewsMark, news: JobWaiting) -> None:
        """Stores why a job waits."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            _change_status(job, JobStatus.RUNNING, JobStatus.QUEUED)
            add_event(session, job, now, f"Fine-tuning job {news.reason}")

        await self._take(mark, news.job, write)

    async def noted(self, mark: NewsMark, id: str, text: str, level: str) -> None:
        """Stores a message about a job, with its level."""
        await self._take(mark, id, lambda session, job, now: add_event(session, job, now, text, level))

    async def started(self, mark: NewsMark, news: JobStarted) -> None:
        """Stores that a job has started or resumed."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            _change_status(job, JobStatus.QUEUED, JobStatus.RUNNING)
            job.step, job.steps, job.stepped = news.step, news.steps, self._clock()
            job.examples, job.truncated = news.examples, news.truncated
            job.skipped, job.dropped = news.skipped, news.dropped
            if news.step:
                add_event(session, job, now, f"Fine-tuning job resumed from step {news.step}")
                return
            add_event(session, job, now, f"Fine-tuning job started: {news.steps} steps")
            if lost := _lost(news):
                add_event(session, job, now, lost, "warn")
            if news.ignored:
                names = ", ".join(f'"{name}"' for name in news.ignored)
                add_event(session, job, now, f"Not read of the training file's records: {names}", "warn")

        await self._take(mark, news.job, write)

    async def stepped(self, mark: NewsMark, news: JobStep) -> None:
        """Stores an optimizer step."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            event = _at(session, Event, news)
            if event is None:
                event = Event(new_id("ftevent"), job.id, now, "info", "", "metrics", step=news.step)
                session.add(event)
            repeated = 0 if event.data is None else event.data["tokens"]
            event.message, event.data = _line(news, job.steps), _figures(news, job.steps)
            job.step, job.stepped = news.step, self._clock()
            job.trained_tokens += news.tokens - repeated
            note_trained(session, now, job.tenant, job.model, news.tokens - repeated)
            job.pace = news.seconds if job.pace is None else job.pace + _PACE * (news.seconds - job.pace)

        await self._take(mark, news.job, write)

    async def checkpointed(self, mark: NewsMark, news: JobCheckpoint) -> Path | None:
        """Stores a checkpoint, which requests can then name. Returns the path of the one of that step that it
        replaces, as another server's; None where there is none."""
        replaced: Path | None = None

        def write(session: Session, job: JobRecord, now: int) -> None:
            nonlocal replaced
            path, losses = self._relative(Path(news.path)), _losses(news, _at(session, Event, news))
            size = bytes_in(Path(news.path), RESUMING)
            _add_validation(session, news)
            known = _at(session, CheckpointRecord, news)
            if known is not None:  # an engine that resumes from it reports it again
                replaced = None if known.path == path else known.path
                if known.digest != news.digest:  # other contents are another version
                    known.id = new_id("ftckpt")
                known.path, known.digest, known.metrics, known.bytes = path, news.digest, losses, size
                return
            id, name = new_id("ftckpt"), f"{job.name}:ckpt-step-{news.step}"
            session.add(CheckpointRecord(id, job.id, news.step, name, path, news.digest, now, losses, size))
            add_event(session, job, now, f"Checkpoint created at step {news.step}: {name}")

        await self._take(mark, news.job, write)
        return replaced

    async def succeeded(
        self, mark: NewsMark | None, id: str, step: int, adapter: Adapter, result: File
    ) -> bool:
        """Stores a job's success, and its adapter and result file, which are on disk. Without a `mark` it is
        no engine's event. False, as below, where another server has the job."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            add_adapter(session, adapter)
            session.add(result)
            job.status, job.finished, job.result_file, job.step = JobStatus.SUCCEEDED, now, result.id, step
            job.saving = False
            add_event(session, job, now, f"New fine-tuned model created: {adapter.name}")
            add_event(session, job, now, "The job has successfully completed")

        return await self._take(mark, id, write)

    async def failed(self, mark: NewsMark | None, id: str, error: dict[str, Any]) -> bool:
        """Stores a job's failure. `error` has a code, a message and a param, as in OpenAI's API."""
        return await self._take(mark, id, lambda session, job, now: fail_job(session, job, now, error))

    async def stopped(self, mark: NewsMark, id: str, step: int, why: str) -> None:
        """Stores that a job left the engine resumable: it is queued again, unless it is paused. `why` as in
        `job_words.stopped`."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            if (said := job_words.stopped(job.status, step, why)) is not None:
                add_event(session, job, now, said)
            _change_status(job, JobStatus.RUNNING, JobStatus.QUEUED)

        await self._take(mark, id, write)

    async def cancelled(self, mark: NewsMark, id: str) -> bool:
        """Stores a job's cancellation, usually known already."""

        def write(session: Session, job: JobRecord, now: int) -> None:
            job.status, job.finished = JobStatus.CANCELLED, now

        return await self._take(mark, id, write)

    @writes
    def _take(
        self,
        session: Session,
        mark: NewsMark | None,
        id: str,
        work: Callable[[Session, JobRecord, int], None],
    ) -> bool:
        """Runs `work` on an unfinished job, with the time in whole seconds, if the event is new. An event of
        a job that another server has taken over changes nothing: False."""
        if mark is not None and not self._move(session, mark):
            return True
        job = job_in(session, id)
        if job is None or job.status.is_final:
            return True
        if own := self._leases.holds(session, "job", id):
            work(session, job, int(self._clock()))
        return own

    def _move(self, session: Session, mark: NewsMark) -> bool:
        """Moves the mark to this event; False if it was stored before."""
        if _is_seen(session.get(NewsMark, mark.generation), mark):
            return False
        session.merge(NewsMark(mark.generation, mark.number, self._leases.owner))
        return True


def _change_status(job: JobRecord, before: JobStatus, after: JobStatus) -> None:
    """Changes a status, unless another one was requested meanwhile."""
    if job.status == before:
        job.status = after


def _is_seen(known: NewsMark | None, mark: NewsMark) -> bool:
    return known is not None and mark.number <= known.number


def _at(session: Session, kind: type[OfStep], news: JobStep | JobCheckpoint) -> OfStep | None:
    """The row of one optimizer step of a job."""
    return session.scalar(select(kind).where(kind.job == news.job, kind.step == news.step))


def _add_validation(session: Session, news: JobCheckpoint) -> None:
    """Adds the figures of validation, known some time after their step, to the step's."""
    found = validation_figures(news)
    event = _at(session, Event, news) if found else None
    if event is not None and event.data is not None:
        event.data = {**event.data, **{name: _finite(value) for name, value in found.items()}}


def _lost(news: JobStarted) -> str | None:
    """A sentence about examples that were cut or left out; None without any."""
    told = (
        (news.skipped, "too long and skipped"),
        (news.truncated, "too long and truncated"),
        (news.dropped, "left out, as there is nothing to learn"),
        (news.split, f"plain text and too long, and cut into {news.pieces} pieces"),
    )
    total = news.examples + news.skipped + news.dropped + news.split - news.pieces
    parts = [f"{count} {'is' if count == 1 else 'are'} {what}" for count, what in told if count]
    return f"Of {total} examples {'; '.join(parts)}" if parts else None


def _line(news: JobStep, steps: int | None) -> str:
    total = f"/{steps}" if steps else ""
    validated = "" if news.validation_loss is None else f", validation loss={news.validation_loss:.4f}"
    return f"Step {news.step}{total}: training loss={news.loss:.4f}{validated}"


def _figures(news: JobStep, steps: int | None) -> dict[str, Any]:
    figures = {
        "step": news.step,
        "total_steps": steps,
        "train_loss": news.loss,
        "valid_loss": news.validation_loss,
        "learning_rate": news.learning_rate,
        "grad_norm": news.grad_norm,
        "labels": news.labels,
        "tokens": news.tokens,
        "seconds": news.seconds,
        **{_TRAINED.get(name, name): value for name, value in news.metrics.items()},
    }
    return {name: _finite(value) for name, value in figures.items()}


def _losses(news: JobCheckpoint, step: Event | None) -> dict[str, Any]:
    """The figures of a checkpoint, also what its step has told of accuracy."""
    known = {} if step is None or step.data is None else step.data
    trained = {name: known.get(name) for name in _TRAINED.values()}
    losses = {"step": news.step, "train_loss": news.loss, **trained, **validation_figures(news)}
    return {name: _finite(value) for name, value in losses.items() if value is not None}


def validation_figures(news: JobCheckpoint) -> dict[str, float]:
    """The figures of a checkpoint's validation, by their names in the API. Those that OpenAI's has of a part
    of the file and of all of it have both names: validation is always of all of it."""
    loss = {} if news.validation_loss is None else {"valid_loss": news.validation_loss}
    found = loss | {f"valid_{name}": value for name, value in news.metrics.items()}
    return found | {f"full_{name}": found[name] for name in _OF_ALL if name in found}


def _finite(value: float | None) -> float | None:
    """The value, None for NaN and infinities, which JSON lacks."""
    return value if value is None or math.isfinite(value) else None
