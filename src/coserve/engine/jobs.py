"""Fine-tuning jobs of a server: read from a file, written to a folder, resumable after a crash.

Reading data and writing checkpoints run in the background; their outcomes are handled between two steps.
Events of a job are numbered and kept until a server acknowledges that it has stored them. A checkpoint is
reported once it is on disk and, where there is a validation file, its loss is known. It has the reports of
steps that no server has acknowledged, for the engine that resumes from it. The end of a job is reported after
all its checkpoints.
"""

from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from coserve.core.contained import contained
from coserve.core.events import Event, JobFailed, StepDone
from coserve.core.job_status import JobStatus
from coserve.engine.background import Background, Outcome
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning, Keeping, StateSnapshot
from coserve.engine.job_files import adapter_of, read_job, reference_of
from coserve.engine.scoring import Scoring
from coserve.engine.served_job import (
    BestCheckpoint,
    PendingCheckpoint,
    ServedJob,
    leave_unscored,
    start_scoring,
)
from coserve.errors import ConfigError, CoserveError, JobError
from coserve.schedule.training_queue import starved
from coserve.train.checkpoint import Checkpoint, write_checkpoint
from coserve.train.job import PreparedJob
from coserve.train.objectives import Reinforcement
from coserve.wire.messages import (
    Fault,
    JobCheckpoint,
    JobEnded,
    JobNews,
    JobNote,
    JobSpec,
    JobStarted,
    JobStarved,
    JobStep,
    JobWaiting,
    Numbered,
)

_READERS: Final = 8  # jobs whose data are read at once
_GRADERS: Final = 4  # threads for the grader of a job


class Jobs:
    """All jobs of one engine's process."""

    def __init__(self, engine: Engine, background: Background) -> None:
        self._engine, self._background = engine, background
        self._readers = background.another(_READERS, "reader")  # of data, which may take minutes
        self._jobs: dict[str, ServedJob] = {}
        self._numbered = 0
        self._unacknowledged: deque[Numbered] = deque()
        self._fresh: list[Numbered] = []  # not reported on this connection
        # Threads of its own for each job's grader: a slow one delays its own job alone.
        for one in engine.bases:
            one.rollouts.asides = lambda: background.another(_GRADERS, "grader")

    # Commands of a server

    @property
    def names(self) -> tuple[str, ...]:
        """Jobs that have not ended."""
        return tuple(self._jobs)

    @property
    def waiting(self) -> dict[str, str]:
        """Reasons, by job, of jobs that are read and wait to start."""
        reasons = {name: job.handle.reason for name, job in self._jobs.items() if job.handle and job.waits}
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def starved(self) -> tuple[JobStarved, ...]:
        """News of the running jobs that get no time to train."""
        found = (self._starvation(name) for name in self._jobs)
        return tuple(news for news in found if news.seconds is not None)

    def start(self, spec: JobSpec) -> None:
        """Starts reading a job's files; ignored for a job that runs already."""
        job = self._jobs.get(spec.job)
        if job is not None:
            if job.ending is not None or job.stop is not None:
                job.again = spec
            return
        if self._is_over(spec.job):  # its end is still to be reported
            return
        best = BestCheckpoint(spec.patience, spec.threshold, spec.validated) if spec.keep_best else None
        engine = next((one for one in self._engine.bases if one.base_id == spec.base), self._engine)
        self._jobs[spec.job] = job = ServedJob(spec, engine, engine.clock(), best)
        if engine.base_id != spec.base:
            self._give_up(job, ConfigError(f"there is no base {spec.base!r} in this engine"))
            return
        self._readers.do("reading the job", partial(read_job, engine, spec), partial(self._read, job))

    def stop(self, name: str, keep: bool) -> None:
        """Ends a job's training; with `keep` after a checkpoint of its state."""
        job = self._jobs.get(name)
        if job is None:
            return
        job.again = None
        leave_unscored(job)
        if job.ending is not None:
            self._settle(job)
            return
        if job.handle is None:
            job.stop = JobStatus.PAUSED if keep else JobStatus.CANCELLED
            return
        if keep and job.step and not job.waits:
            self._report(job)
            if job.step == job.kept:  # two threads would write one folder
                job.handle.cancel()
            else:
                self._keep(job, job.handle.set_aside())
            leave_unscored(job)  # scored when the job resumes from it
            self._end(job, JobStatus.PAUSED)
        else:
            job.handle.cancel()
            self._end(job, JobStatus.PAUSED if keep else JobStatus.CANCELLED)

    def fail(self, name: str, error: CoserveError) -> None:
        """Fails a job for an error outside its training."""
        job = self._jobs.get(name)
        if job is not None:
            self._give_up(job, error)

    def stop_all(self) -> None:
        """Stops all jobs with checkpoints to resume from."""
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
        job.spec = msgspec.structs.replace(job.spec, weight=weight)
        if job.handle is not None and job.handle.status == JobStatus.RUNNING:
            job.engine.training.set_weight(name, weight)

    def acknowledge(self, number: int) -> None:
        """Drops events up to this number."""
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            self._unacknowledged.popleft()

    # Calls of the loop

    def repeat_news(self) -> None:
        """Queues all unacknowledged events again, for a new server."""
        self._fresh = list(self._unacknowledged)

    def take_news(self) -> tuple[Numbered, ...]:
        """Events since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def after_step(self, events: list[Event]) -> None:
        """Handles a step's events of jobs."""
        for event in events:
            if isinstance(event, StepDone) and (job := self._jobs.get(event.job)):
                self._stepped(job)
            elif isinstance(event, JobFailed) and (job := self._jobs.get(event.job)):
                self._end(job, JobStatus.FAILED, event.error)
        for job in list(self._jobs.values()):
            self._advance(job)

    # Inside

    def _advance(self, job: ServedJob) -> None:
        """Goes on with a job's checkpoints and reports; fails it where that raises."""
        try:
            self._follow(job)
            for pending in job.pending:
                if pending.scoring is not None:
                    pending.scoring.advance()
            self._settle(job)
        except BaseException as error:
            self._give_up(job, contained(error, "the job", JobError))

    def _give_up(self, job: ServedJob, error: CoserveError) -> None:
        """Fails a job at any stage; its checkpoints stay."""
        leave_unscored(job)
        if job.handle is not None and job.handle.is_under_way:
            job.handle.cancel()
        self._end(job, JobStatus.FAILED, error)

    def _read(self, job: ServedJob, outcome: Outcome[PreparedJob]) -> None:
        """Begins a job whose data is read, once nothing is left of an earlier run of it."""
        job.engine.openings.when_left(job.spec.job, partial(self._begin, job, outcome))

    def _begin(self, job: ServedJob, outcome: Outcome[PreparedJob]) -> None:
        """Starts or resumes training once the data is read."""
        if self._jobs.get(job.spec.job) is not job:  # it has failed meanwhile
            return
        if isinstance(outcome, CoserveError):
            self._give_up(job, outcome)
            return
        job.prepared = prepared = outcome
        job.step = prepared.checkpoint.step if prepared.checkpoint else 0
        if job.best is not None:
            job.best.resume(job.step)
        if job.stop is not None:
            self._end(job, job.stop)
            return
        try:
            if prepared.validation_reference is not None:
                job.engine.adapters.add_stored(prepared.validation_reference)
            keeping = Keeping(job.spec.every, partial(self._keep, job))
            weighed = replace(prepared, config=replace(prepared.config, weight=job.spec.weight))
            job.handle = job.engine.training.start(weighed, keeping, partial(self._advance, job))
        except CoserveError as error:
            self._end(job, JobStatus.FAILED, error)
            return
        # The handle keeps the state as long as it is needed.
        job.prepared = replace(prepared, resume=None)
        if job.handle.status == JobStatus.QUEUED:
            job.waits = True
            if job.handle.reason:  # else its session is being opened
                self._tell(JobWaiting(job.spec.job, job.handle.reason))
        else:
            self._begun(job, job.handle, prepared)

    def _follow(self, job: ServedJob) -> None:
        """Reports the start of a job that waited for bytes, whether it is starved, and its new notes."""
        handle = job.handle
        if handle is None:
            return
        if job.waits and handle.status != JobStatus.QUEUED and job.ending is None:
            job.waits = False
            assert job.prepared is not None
            if handle.error is not None:
                self._end(job, JobStatus.FAILED, handle.error)
            else:
                self._begun(job, handle, job.prepared)
        starvation = self._starvation(job.spec.job)
        is_starved = starvation.seconds is not None
        if is_starved is not job.starved and job.ending is None:
            job.starved = is_starved
            self._tell(starvation)
        for note in handle.notes[job.noted :]:
            self._tell(JobNote(job.spec.job, note))
        job.noted = len(handle.notes)

    def _starvation(self, name: str) -> JobStarved:
        found = starved(self._engine.scheduler.training, name)
        return (
            JobStarved(name, None)
            if found is None
            else JobStarved(name, self._engine.clock() - found[0], found[1])
        )

    def _begun(self, job: ServedJob, handle: FineTuning, prepared: PreparedJob) -> None:
        """Reports that a job's first step is under way."""
        name = job.spec.job
        job.last = self._engine.clock()
        if handle.status == JobStatus.RUNNING:
            job.engine.training.set_weight(name, job.spec.weight)  # it may have changed while the job waited
        self._tell(_started(name, job.step, handle.steps, prepared))
        # The engine that wrote the checkpoint may have ended before a server heard of it.
        if (checkpoint := prepared.checkpoint) is not None:
            for report in checkpoint.reports:
                self._tell(msgspec.convert({**report, "job": name}, JobStep))
            job.pending.append(PendingCheckpoint(self._scoring(job), checkpoint))
            job.kept = checkpoint.step
        if handle.status == JobStatus.SUCCEEDED:  # its last step was done already
            self._end(job, JobStatus.SUCCEEDED)

    def _stepped(self, job: ServedJob) -> None:
        assert job.handle is not None
        self._report(job)
        if job.handle.status == JobStatus.SUCCEEDED:
            self._end(job, JobStatus.SUCCEEDED)
        elif job.handle.error is not None:  # an error after a step
            self._end(job, JobStatus.FAILED, job.handle.error)

    def _report(self, job: ServedJob) -> None:
        """Reports a job's newest optimizer step, once."""
        assert job.handle is not None
        if not job.handle.history or job.handle.history[-1].step == job.step:
            return
        now, updated = self._engine.clock(), job.handle.history[-1]  # with its objective's figures
        job.step = updated.step
        self._tell(
            JobStep(
                job=job.spec.job,
                step=updated.step,
                loss=updated.loss,
                labels=updated.labels,
                tokens=updated.tokens,
                grad_norm=updated.grad_norm,
                learning_rate=updated.learning_rate,
                seconds=now - job.last,
                metrics=dict(updated.metrics),
            )
        )
        job.last = now

    def _keep(self, job: ServedJob, snapshot: StateSnapshot) -> None:
        """Copies and writes a state in the background."""
        job.kept = snapshot.step
        self._report(job)
        reports = [
            msgspec.to_builtins(numbered.news)
            for numbered in self._unacknowledged
            if isinstance(numbered.news, JobStep) and numbered.news.job == job.spec.job
        ]
        pending = PendingCheckpoint(self._scoring(job))
        job.pending.append(pending)
        base_name = str(job.engine.base.model.config.name_or_path)

        def write() -> Checkpoint:
            return write_checkpoint(
                Path(job.spec.folder), snapshot.read(), base_name, reports, job.spec.attempt
            )

        self._background.do("writing the checkpoint", write, partial(self._written, job, pending))

    def _scoring(self, job: ServedJob) -> Scoring | None:
        """Starts scoring the version that the job has just published."""
        if job.prepared is None:
            return None
        version = job.engine.adapters.bank.look(adapter_of(job.spec.job))
        return start_scoring(job, job.prepared, version.key, partial(self._advance, job))

    def _written(self, job: ServedJob, pending: PendingCheckpoint, outcome: Outcome[Checkpoint]) -> None:
        if not isinstance(outcome, CoserveError):
            pending.written = outcome
            self._settle(job)
            return
        if pending in job.pending:
            job.pending.remove(pending)
        if pending.scoring is not None:
            pending.scoring.cancel()
        self._give_up(job, outcome)  # a job without its checkpoint has failed, however it ended

    def _end(self, job: ServedJob, status: JobStatus, error: CoserveError | None = None) -> None:
        fault = None if error is None else Fault.of(error)
        job.ending = JobEnded(job.spec.job, status, job.step, fault)
        self._settle(job)

    def _settle(self, job: ServedJob) -> None:
        """Reports checkpoints in order, and then the job's end."""
        name = job.spec.job
        while job.pending and job.pending[0].is_complete:
            pending = job.pending.popleft()
            found = None if pending.scoring is None else pending.scoring.result
            assert pending.written is not None
            self._tell(
                JobCheckpoint(
                    job=name,
                    step=pending.written.step,
                    path=str(pending.written.path),
                    digest=pending.written.digest,
                    loss=pending.written.loss,
                    validation_loss=None if found is None else found.loss,
                    metrics={} if found is None else dict(found.metrics),
                )
            )
            if job.best is not None and found is not None:
                job.best.take(pending.written.step, found.cost)
                self._stop_if_hopeless(job, job.best)
        if job.ending is None or job.pending or self._jobs.get(name) is not job:
            return
        del self._jobs[name]
        for adapter in (adapter_of(name), reference_of(name)):
            if adapter in self._engine.adapters.bank.names:  # not if it never began
                job.engine.adapters.unload(adapter)
        if job.best is not None and job.ending.status == JobStatus.SUCCEEDED and job.best.best is not None:
            step, cost = job.best.best
            told = f"reward {-cost:.4f}" if _is_rewarded(job) else f"{cost:.4f}"
            self._tell(JobNote(name, f"The best checkpoint is that of step {step}: {told}", "info"))
            job.ending = msgspec.structs.replace(job.ending, step=step)
        self._tell(job.ending)
        if job.again is not None:
            self.start(job.again)

    def _stop_if_hopeless(self, job: ServedJob, best: BestCheckpoint) -> None:
        """Ends a job whose patience with early stopping is over. Steps since the best checkpoint are
        dropped."""
        handle = job.handle
        if not best.is_hopeless or job.ending is not None or handle is None or not handle.is_under_way:
            return
        handle.finish()
        missed = "higher reward in validation" if _is_rewarded(job) else "lower validation loss"
        text = f"Stopped early at step {job.step}: no {missed} {best.without_gain} times in a row"
        self._tell(JobNote(job.spec.job, text, "info"))
        leave_unscored(job)
        job.ending = JobEnded(job.spec.job, JobStatus.SUCCEEDED, job.step)

    def _is_over(self, name: str) -> bool:
        """Tells whether an unacknowledged event ends the job for good."""
        ends = [n.news for n in self._unacknowledged if isinstance(n.news, JobEnded) and n.news.job == name]
        return bool(ends) and ends[-1].status != JobStatus.PAUSED

    def _tell(self, news: JobNews) -> None:
        self._numbered += 1
        numbered = Numbered(self._numbered, news)
        self._unacknowledged.append(numbered)
        self._fresh.append(numbered)


def _is_rewarded(job: ServedJob) -> bool:
    return job.spec.objective.get("type") == Reinforcement.name


def _started(job: str, step: int, steps: int, prepared: PreparedJob) -> JobStarted:
    data, config = prepared.data, prepared.config
    return JobStarted(
        job=job,
        step=step,
        steps=steps,
        examples=prepared.units,
        tokens=data.tokens,
        truncated=data.counts.truncated,
        dropped=data.counts.dropped,
        epochs=config.epochs,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        ignored=data.ignored,
        skipped=data.counts.skipped,
        split=data.counts.split,
        pieces=data.counts.pieces,
    )
