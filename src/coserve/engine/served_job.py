"""The state of a server's job in the engine's process: what was read for it, its handle, checkpoints."""

from collections import deque
from dataclasses import dataclass, field

from coserve.adapters.paging.stored import StoredVersion
from coserve.core.job_status import JobStatus
from coserve.engine.best_checkpoint import BestCheckpoint
from coserve.engine.finetuning import FineTuning, PreparedJob
from coserve.engine.scoring import Scoring
from coserve.train.checkpoint import Checkpoint
from coserve.train.example import Prepared
from coserve.wire.messages import JobEnded, JobSpec, StartJob


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Everything read for a job. `checkpoint` is the one it resumes from. Validation of a job with a
    reference asks the adapter `reference`, None for the base, and keeps what it said in `compared`."""

    prepared: PreparedJob
    validation: Prepared | None
    checkpoint: Checkpoint | None
    reference: StoredVersion | None = None
    compared: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is not reported yet."""

    scoring: Scoring | None
    written: Checkpoint | None = None

    @property
    def is_complete(self) -> bool:
        return self.written is not None and (self.scoring is None or self.scoring.result is not None)


@dataclass(slots=True, eq=False)
class ServedJob:
    """A job, and which of its events are reported. `handle` is set once it trains or waits for bytes
    (`waits`); `noted` of its notes are reported, and whether it is `starved`. `best` follows its validation
    where that decides which checkpoint is the result. `ending` is its last event, reported after its
    checkpoints; `again` restarts it after that."""

    spec: JobSpec
    last: float  # when its last step was, on the engine's clock
    weight: float
    best: BestCheckpoint | None = None
    ready: ReadJob | None = None
    handle: FineTuning | None = None
    waits: bool = False
    noted: int = 0
    starved: bool = False
    step: int = 0
    kept: int = 0  # the newest step whose state was passed on to be written
    pending: deque[PendingCheckpoint] = field(default_factory=deque)
    stop: JobStatus | None = None  # stop requested while its data was read
    ending: JobEnded | None = None
    again: StartJob | None = None


def leave_unscored(job: ServedJob) -> None:
    """Stops scoring a job's checkpoints, so that they are reported as soon as they are written."""
    for pending in job.pending:
        if pending.scoring is not None:
            pending.scoring.cancel()
            pending.scoring = None
