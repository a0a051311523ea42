"""A fine-tuning job as its caller has it: what was asked for, and the handle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coserve.adapters.adapter import AdapterVersion
from coserve.core.events import StepDone
from coserve.core.plan import Updated
from coserve.errors import ConfigError, CoserveError, OutOfMemory
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared
from coserve.train.state import TrainingState


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which states of a job are worth keeping: after every `every` optimizer steps, and after the last.

    `take` gets them between two steps, so it should only pass them on.
    """

    every: int
    take: Callable[[TrainingState], None]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"keeping.every must be at least 1 step, not {self.every}")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A fine-tuning job as it was asked for. `method` are the settings of an adapter's method, or of several;
    `start` is the version that training begins with, None for a fresh one; `resume` where the same job stood
    before."""

    job: str
    adapter: str
    data: Prepared
    method: object | Sequence[object]
    config: TrainingConfig
    start: AdapterVersion | None = None
    resume: TrainingState | None = None

    @property
    def methods(self) -> tuple[object, ...]:
        """The settings of all methods."""
        return tuple(self.method) if isinstance(self.method, Sequence) else (self.method,)


class Trainer(Protocol):
    """The engine as a job's handle needs it."""

    def drive(self) -> bool:
        """Steps the engine once; False where there is nothing to do."""
        ...

    def end(self, job: str, status: str) -> None:
        """Ends a job that has not ended; all it held is free."""
        ...

    def state(self, job: str) -> TrainingState:
        """State of a job. Raises JobError where there is none."""
        ...

    def save(self, adapter: str, folder: str | Path) -> None:
        """Writes an adapter's newest version in PEFT's format."""
        ...


class FineTuning:
    """One fine-tuning job. Iterate it for its optimizer steps, or wait for its `result`; both raise what made
    it fail.

    `truncated` examples lost their ends to a maximum length; `dropped` ones had no label left. `status` is
    queued (then `reason` says what it waits for), running, and in the end succeeded, failed, cancelled or
    stopped. `notes` tell of what went otherwise than was asked for.
    """

    def __init__(self, spec: JobSpec, steps: int, trainer: Trainer, keeping: Keeping | None = None) -> None:
        self.job, self.adapter, self.steps = spec.job, spec.adapter, steps
        self.truncated, self.dropped = spec.data.truncated, spec.data.dropped
        self.weight = spec.config.weight  # share among jobs that train at the same time
        self.status = "queued"
        self.reason = ""
        self.notes: list[str] = []
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
                yield from self.history[self._read :]  # another thread may have driven to the end meanwhile
                self._read = len(self.history)
                self._raise()
                return

    def result(self) -> "FineTuning":
        """Runs the engine until the job has ended; raises what made it fail, or OutOfMemory where it waits
        for bytes that nothing under way will free."""
        while self.is_under_way and self._trainer.drive():
            pass
        self._raise()
        return self

    @property
    def is_under_way(self) -> bool:
        """Tells whether the job trains, or is going to."""
        return self.status in ("queued", "running")

    def cancel(self) -> None:
        """Stops the job; its last published version stays."""
        self._trainer.end(self.job, "cancelled")

    def pause(self) -> TrainingState:
        """Stops the job, to be resumed from the state returned: `train.checkpoint` keeps it on disk."""
        state = self._trainer.state(self.job)
        self._trainer.end(self.job, "stopped")
        return state

    def save(self, folder: str | Path) -> None:
        """Writes the adapter's newest version in PEFT's format."""
        self._trainer.save(self.adapter, folder)

    def take(self, event: StepDone) -> None:
        self.history.append(event.updated)
        step, keeping = event.updated.step, self._keeping
        if keeping is not None and (step == self.steps or step % keeping.every == 0):
            keeping.take(self._trainer.state(self.job))

    def wait(self, reason: str) -> None:
        """The job cannot begin yet."""
        self.reason = reason

    def begin(self) -> None:
        """The job trains from now on."""
        self.status, self.reason = "running", ""

    def end(self, status: str) -> None:
        """The job is over; who was told of its states need not be any more."""
        self.status, self.reason, self._keeping = status, "", None

    def fail(self, error: CoserveError) -> None:
        """The job cannot go on."""
        self.end("failed")
        self.error = error

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
        if self.status == "queued":
            raise OutOfMemory(f"job {self.job} {self.reason}")
