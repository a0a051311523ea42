"""Fine-tuning jobs as a server gives them: from a file, into a folder, resumed after anything.

Whatever takes long and is not a step (reading data, writing checkpoints) is done aside, and what it led to is
taken in between two steps. What happens to a job becomes numbered news, kept until a server has written it
down. A checkpoint is news once it is on disk and, where there is a validation file, its loss is known. The
end of a job comes after the news of all its checkpoints.
"""

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.files import read_adapter
from coserve.adapters.settings import convert, settings_of
from coserve.core.contained import contained
from coserve.core.events import Event, JobFailed, StepDone
from coserve.core.plan import Updated
from coserve.engine.background import Background, Outcome
from coserve.engine.checking import foresee_job
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning, Keeping
from coserve.engine.scoring import Scoring, check_lengths
from coserve.errors import CoserveError, DataError, JobError
from coserve.train.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, write_checkpoint
from coserve.train.config import TrainingConfig
from coserve.train.example import Example, Prepared
from coserve.train.fresh import sketch_adapter
from coserve.train.state import TrainingState
from coserve.wire.messages import (
    Fault,
    JobCheckpoint,
    JobEnded,
    JobNews,
    JobNote,
    JobStarted,
    JobStep,
    JobWaiting,
    Numbered,
    StartJob,
)


def fault_of(error: CoserveError) -> Fault:
    return Fault(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class _Ready:
    """Everything that was read for a job."""

    training: TrainingConfig
    method: tuple[object, ...]
    data: Prepared
    validation: tuple[Example, ...]
    start: AdapterVersion | None
    checkpoint: Checkpoint | None
    resume: TrainingState | None


@dataclass(slots=True, eq=False)
class _Pending:
    """A checkpoint that is not news yet."""

    scoring: Scoring | None
    written: Checkpoint | None = None

    @property
    def is_complete(self) -> bool:
        return self.written is not None and (self.scoring is None or self.scoring.loss is not None)


@dataclass(slots=True, eq=False)
class _Job:
    """`handle` is there once it trains or waits for bytes, which `waits` says; `noted` of its notes are told.
    `ending` is its last news but for the checkpoints before it; `again` what to start it with after that."""

    command: StartJob
    last: float  # when its last step was, on the engine's clock
    weight: float
    ready: _Ready | None = None
    handle: FineTuning | None = None
    waits: bool = False
    noted: int = 0
    step: int = 0
    kept: int = 0  # the newest step whose state was passed on to be written
    pending: deque[_Pending] = field(default_factory=deque)
    stop: str | None = None  # asked for while its data was read
    ending: JobEnded | None = None
    again: StartJob | None = None


class Jobs:
    """All jobs of one engine's process."""

    def __init__(self, engine: Engine, background: Background) -> None:
        self._engine, self._background = engine, background
        self._jobs: dict[str, _Job] = {}
        self._numbered = 0
        self._unacknowledged: deque[Numbered] = deque()
        self._fresh: list[Numbered] = []  # not told on this connection

    # What a server asks for

    @property
    def names(self) -> tuple[str, ...]:
        """Jobs that have not ended."""
        return tuple(self._jobs)

    @property
    def waiting(self) -> dict[str, str]:
        """Why jobs wait that are read and cannot begin."""
        return {name: job.handle.reason for name, job in self._jobs.items() if job.handle and job.waits}

    def start(self, command: StartJob) -> None:
        """Begins to read what the job needs; nothing happens to one that runs already."""
        job = self._jobs.get(command.job)
        if job is not None:
            if job.ending is not None or job.stop is not None:
                job.again = command
            return
        if self._is_over(command.job):  # the server will hear of it
            return
        self._jobs[command.job] = job = _Job(command, self._engine.clock(), command.weight)
        self._background.do(
            "reading the job", partial(_read, self._engine, command), partial(self._begin, job)
        )

    def stop(self, name: str, keep: bool) -> None:
        """Ends a job's training, with a checkpoint of where it stands or without."""
        job = self._jobs.get(name)
        if job is None:
            return
        job.again = None
        _leave_unscored(job)
        if job.ending is not None:
            self._settle(job)
            return
        if job.handle is None:
            job.stop = "stopped" if keep else "cancelled"
            return
        if keep and job.step and not job.waits:
            state = job.handle.pause()
            self._keep(job, state)
            _leave_unscored(job)  # whoever goes on from here scores it
            self._end(job, "stopped")
        else:
            job.handle.cancel()
            self._end(job, "stopped" if keep else "cancelled")

    def fail(self, name: str, error: CoserveError) -> None:
        """Ends a job for a reason that did not come up in its training."""
        job = self._jobs.get(name)
        if job is not None:
            self._give_up(job, error)

    def stop_all(self) -> None:
        """Stops all jobs with checkpoints, so that they can go on later."""
        for name in self.names:
            try:
                self.stop(name, keep=True)
            except BaseException as error:
                self.fail(name, contained(error, "the job", JobError))

    def set_weight(self, name: str, weight: float) -> None:
        """Changes a job's share."""
        job = self._jobs.get(name)
        if job is None or not weight > 0:
            return
        job.weight = weight
        if job.handle is not None and job.handle.status == "running":
            self._engine.set_weight(name, weight)

    def acknowledge(self, number: int) -> None:
        """Forgets news up to this number."""
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()

    # What the loop does

    def repeat_news(self) -> None:
        """A new server hears all that was not acknowledged."""
        self._fresh = list(self._unacknowledged)

    def take_news(self) -> tuple[Numbered, ...]:
        """News since the last time."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def after_step(self, events: list[Event]) -> None:
        """Takes in what a step did for the jobs."""
        for event in events:
            if isinstance(event, StepDone) and (job := self._jobs.get(event.job)):
                self._stepped(job, event.updated)
            elif isinstance(event, JobFailed) and (job := self._jobs.get(event.job)):
                self._end(job, "failed", event.error)
        for job in list(self._jobs.values()):
            try:
                self._advance(job)
            except BaseException as error:
                self._give_up(job, contained(error, "the job", JobError))

    # Inside

    def _advance(self, job: _Job) -> None:
        self._follow(job)
        for pending in job.pending:
            if pending.scoring is not None:
                pending.scoring.advance()
        self._settle(job)

    def _give_up(self, job: _Job, error: CoserveError) -> None:
        """The job has failed, wherever it was: it trains no more, and the checkpoints it has stay."""
        _leave_unscored(job)
        if job.handle is not None and job.handle.is_under_way:
            job.handle.cancel()
        self._end(job, "failed", error)

    def _begin(self, job: _Job, outcome: Outcome[_Ready]) -> None:
        """The data is read: training starts, or goes on."""
        if isinstance(outcome, CoserveError):
            self._give_up(job, outcome)
            return
        job.ready = ready = outcome
        job.step = ready.checkpoint.step if ready.checkpoint else 0
        if job.stop is not None:
            self._end(job, job.stop)
            return
        name = job.command.job
        try:
            check_lengths(self._engine, ready.validation, self._virtual(ready))
            keeping = Keeping(job.command.every, partial(self._keep, job))
            training = dataclasses.replace(ready.training, weight=job.weight)
            job.handle = self._engine.finetune(
                ready.data,
                _adapter_of(name),
                ready.method,
                training,
                ready.start,
                name,
                ready.resume,
                keeping,
            )
        except CoserveError as error:
            self._end(job, "failed", error)
            return
        job.ready = dataclasses.replace(ready, start=None, resume=None)  # the engine holds them while it must
        if job.handle.status == "queued":
            job.waits = True
            self._tell(JobWaiting(name, job.handle.reason))
        else:
            self._begun(job, job.handle, ready)

    def _follow(self, job: _Job) -> None:
        """Tells the server if a job that waited for bytes has begun, and what went otherwise than asked
        for."""
        handle = job.handle
        if handle is None:
            return
        if job.waits and handle.status != "queued" and job.ending is None:
            job.waits = False
            assert job.ready is not None
            if handle.error is not None:
                self._end(job, "failed", handle.error)
            else:
                self._begun(job, handle, job.ready)
        for note in handle.notes[job.noted :]:
            self._tell(JobNote(job.command.job, note))
        job.noted = len(handle.notes)

    def _begun(self, job: _Job, handle: FineTuning, ready: _Ready) -> None:
        """Tells the server that a job's first step is under way."""
        name = job.command.job
        job.last = self._engine.clock()
        if handle.status == "running":
            self._engine.set_weight(name, job.weight)  # it may have changed while the job waited
        self._tell(_started(name, job.step, handle.steps, ready))
        if ready.checkpoint is not None:  # the engine that wrote it may have died before it was known
            job.pending.append(_Pending(self._scoring(job), ready.checkpoint))
            job.kept = ready.checkpoint.step
        if handle.status == "succeeded":  # nothing was left to do
            self._end(job, "succeeded")

    def _virtual(self, ready: _Ready) -> int:
        """Positions that the job's adapter takes before every sequence."""
        first = ready.start if ready.resume is None else ready.resume.adapter
        if first is None:
            first = sketch_adapter(self._engine.base, "sketch", ready.method, ready.training.seed)
        return first.virtual.count

    def _stepped(self, job: _Job, updated: Updated) -> None:
        now = self._engine.clock()
        job.step = updated.step
        self._tell(
            JobStep(
                job=job.command.job,
                step=updated.step,
                loss=updated.loss,
                labels=updated.labels,
                tokens=updated.tokens,
                grad_norm=updated.grad_norm,
                learning_rate=updated.learning_rate,
                seconds=now - job.last,
            )
        )
        job.last = now
        assert job.handle is not None
        if job.handle.status == "succeeded":
            self._end(job, "succeeded")
        elif job.handle.error is not None:  # of what comes after a step
            self._end(job, "failed", job.handle.error)

    def _keep(self, job: _Job, state: TrainingState) -> None:
        """Between two steps: the state is copied already, and is written aside."""
        if state.step == job.kept:  # stopped just after one was due: two threads would write one folder
            return
        job.kept = state.step
        pending = _Pending(self._scoring(job))
        job.pending.append(pending)
        base_name = str(self._engine.base.model.config.name_or_path)
        write = partial(write_checkpoint, Path(job.command.folder), state, base_name)
        self._background.do("writing the checkpoint", write, partial(self._written, job, pending))

    def _scoring(self, job: _Job) -> Scoring | None:
        """Scores the version that the job has just published."""
        if job.ready is None or not job.ready.validation:
            return None
        version = self._engine.bank.look(_adapter_of(job.command.job))
        return Scoring(self._engine, version.key, job.ready.validation)

    def _written(self, job: _Job, pending: _Pending, outcome: Outcome[Checkpoint]) -> None:
        if not isinstance(outcome, CoserveError):
            pending.written = outcome
            self._settle(job)
            return
        if pending in job.pending:
            job.pending.remove(pending)
        if pending.scoring is not None:
            pending.scoring.cancel()
        self._give_up(job, outcome)  # whatever its end was: without its checkpoint the job has failed

    def _end(self, job: _Job, status: str, error: CoserveError | None = None) -> None:
        fault = None if error is None else fault_of(error)
        job.ending = JobEnded(job.command.job, status, job.step, fault)
        self._settle(job)

    def _settle(self, job: _Job) -> None:
        """Tells of checkpoints, in order, and then of the job's end."""
        name = job.command.job
        while job.pending and job.pending[0].is_complete:
            pending = job.pending.popleft()
            assert pending.written is not None
            self._tell(
                JobCheckpoint(
                    job=name,
                    step=pending.written.step,
                    path=str(pending.written.path),
                    digest=pending.written.digest,
                    loss=pending.written.loss,
                    validation_loss=pending.scoring.loss if pending.scoring else None,
                )
            )
        if job.ending is None or job.pending or self._jobs.get(name) is not job:
            return
        del self._jobs[name]
        if _adapter_of(name) in self._engine.bank.names:  # not if it never began
            self._engine.unload_adapter(_adapter_of(name))
        self._tell(job.ending)
        if job.again is not None:
            self.start(job.again)

    def _is_over(self, name: str) -> bool:
        """Tells whether there is news that the job has ended for good."""
        ends = [n.news for n in self._unacknowledged if isinstance(n.news, JobEnded) and n.news.job == name]
        return bool(ends) and ends[-1].status != "stopped"

    def _tell(self, news: JobNews) -> None:
        self._numbered += 1
        numbered = Numbered(self._numbered, news)
        self._unacknowledged.append(numbered)
        self._fresh.append(numbered)


def _leave_unscored(job: _Job) -> None:
    """Stops scoring a job's checkpoints: they become news as soon as they are written."""
    for pending in job.pending:
        if pending.scoring is not None:
            pending.scoring.cancel()
            pending.scoring = None


def _adapter_of(job: str) -> str:
    """Name of a job's adapter while it trains; servers name durable versions only."""
    return f"training:{job}"


def _started(job: str, step: int, steps: int, ready: _Ready) -> JobStarted:
    return JobStarted(
        job=job,
        step=step,
        steps=steps,
        examples=len(ready.data.examples),
        tokens=ready.data.tokens,
        truncated=ready.data.truncated,
        dropped=ready.data.dropped,
        epochs=ready.training.epochs,
        batch_size=ready.training.batch_size,
        learning_rate=ready.training.learning_rate,
    )


def _read(engine: Engine, command: StartJob) -> _Ready:
    """Reads all that a job needs, while steps go on."""
    training = convert(command.options, TrainingConfig, "options")
    method = settings_of(command.method)
    data = engine.prepare(Path(command.data), training)
    validation: tuple[Example, ...] = ()
    if command.validation is not None:
        try:
            validation = engine.prepare(Path(command.validation), training).examples
        except DataError as error:
            raise DataError(f"validation {error}") from error
    exact = torch.promote_types(engine.base.dtype, torch.float32)
    name, base = _adapter_of(command.job), engine.base
    checkpoint = newest_checkpoint(Path(command.folder))
    resume = start = None
    if checkpoint is not None:
        resume = read_checkpoint(checkpoint.path, name, base, exact)
    elif command.start_from is not None:
        start = read_adapter(Path(command.start_from), name, base, exact, base.device)
    first = start if resume is None else resume.adapter
    shapes = sketch_adapter(base, name, method, training.seed) if first is None else first
    foresee_job(engine, shapes, training, method if first is None else None)
    return _Ready(training, method, data, validation, start, checkpoint, resume)
