"""A fine-tuning job's handle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coserve.core.job_status import JobStatus
from coserve.core.plan import Updated
from coserve.errors import ConfigError, CoserveError, OutOfMemory
from coserve.train.state import TrainingState
from coserve.train.steps import JobSteps


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A job's state after optimizer step `step`. `read` copies it, once, on any thread, while the job goes on
    or after its end."""

    step: int
    read: Callable[[], TrainingState]


@dataclass(frozen=True, slots=True)
class Keeping:
    """Checkpointing of a job: its state after every `every` optimizer steps and after the last.

    `take` receives the snapshots between two steps and must return quickly: what it reads on another thread
    holds up no step. It reads each of them.
    """

    every: int
    take: Callable[[StateSnapshot], None]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"keeping.every must be at least 1 step, not {self.every}")


class Trainer(Protocol):
    """The engine's methods that a job's handle calls."""

    def drive(self) -> bool:
        """Steps the engine once; False where there is nothing to do."""

    def end(self, job: str, status: JobStatus) -> None:
        """Ends a job that has not ended, and frees its resources."""

    def snapshot(self, job: str) -> StateSnapshot:
        """Snapshot of a job's state. Raises JobError where there is none."""

    def reason(self, job: str) -> str:
        """The reason for which a job waits for bytes; empty for one that does not."""

    def save(self, adapter: str, folder: str | Path) -> None:
        """Writes an adapter's newest version in PEFT's format."""


class FineTuning:
    """One fine-tuning job. Iterate it for its optimizer steps, or wait for its `result`; both raise the error
    of a failed job.

    Of the data's examples those that were too long lost their ends (`truncated`) or were left out
    (`skipped`); `dropped` others had nothing to learn; `ignored` keys of the records, the first of them, were
    not read. `status` is queued (`reason` tells the cause), running, and in the end succeeded, failed,
    cancelled or paused. `notes` name deviations from the request, and what it leaves untrained that it may be
    taken to mean.
    """

    def __init__(self, work: JobSteps, trainer: Trainer, keeping: Keeping | None = None) -> None:
        prepared = work.prepared
        self.job, self.adapter, self.steps = prepared.job, prepared.adapter, work.steps
        counts = prepared.data.counts
        self.truncated, self.skipped, self.dropped = counts.truncated, counts.skipped, counts.dropped
        self.ignored = prepared.data.ignored
        self.weight = prepared.config.weight  # share among jobs that train at the same time
        self.work: JobSteps | None = work  # until it ends
        self.status = JobStatus.QUEUED
        self.notes: list[str] = []
        self.has_shrunk = False  # to leaner settings than asked for
        self.error: CoserveError | None = None
        self.history: list[Updated] = []
        self._trainer, self._keeping = trainer, keeping
        self._read = 0

    def __iter__(self) -> Iterator[Updated]:
        while True:
            while self._read < len(self.history):
                self._read += 1
                yield self.history[self._read - 1]
            if not self.is_under_way or not self._trainer.drive():
                yield from self.history[self._read :]  # another thread may have reached the end meanwhile
                self._read = len(self.history)
                self._raise()
                return

    def result(self) -> "FineTuning":
        """Runs the engine until the job has ended. Raises the error of a failed job, or OutOfMemory where the
        job waits for bytes that no work under way will free."""
        while self.is_under_way and self._trainer.drive():
            pass
        self._raise()
        return self

    @property
    def reason(self) -> str:
        """The reason for which the queued job waits for bytes; empty where it does not."""
        return self._trainer.reason(self.job)

    @property
    def is_under_way(self) -> bool:
        """Tells whether the job is queued or running."""
        return self.status in (JobStatus.QUEUED, JobStatus.RUNNING)

    def cancel(self) -> None:
        """Stops the job; its last published version stays."""
        self._trainer.end(self.job, JobStatus.CANCELLED)

    def finish(self) -> None:
        """Ends the job early as a success; its last published version stays."""
        self._trainer.end(self.job, JobStatus.SUCCEEDED)

    def pause(self) -> TrainingState:
        """Stops the job and returns the state to resume from; `train.checkpoint` writes it to disk."""
        return self.set_aside().read()

    def set_aside(self) -> StateSnapshot:
        """Stops the job as `pause` does, and leaves the copy of its state to the caller."""
        snapshot = self._trainer.snapshot(self.job)
        self._trainer.end(self.job, JobStatus.PAUSED)
        return snapshot

    def save(self, folder: str | Path) -> None:
        """Writes the adapter's newest version in PEFT's format."""
        self._trainer.save(self.adapter, folder)

    def take(self, updated: Updated) -> None:
        """Notes an optimizer step."""
        self.history.append(updated)
        step, keeping = updated.step, self._keeping
        if keeping is not None and (step == self.steps or step % keeping.every == 0):
            keeping.take(self._trainer.snapshot(self.job))

    def begin(self) -> None:
        """Marks the job as running."""
        self._move(JobStatus.RUNNING)

    def end(self, status: JobStatus) -> None:
        """Marks the job as ended with `status`; no more states are passed on."""
        self._move(status)
        self.work = self._keeping = None

    def fail(self, error: CoserveError) -> None:
        """Marks the job as failed with `error`."""
        self.end(JobStatus.FAILED)
        self.error = error

    def _move(self, status: JobStatus) -> None:
        assert self.status.may_become(status), f"job {self.job} is {self.status}: not {status} now"
        self.status = status

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
        if self.status is JobStatus.QUEUED:
            raise OutOfMemory(f"job {self.job} {self.reason}")
