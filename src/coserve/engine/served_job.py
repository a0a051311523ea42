"""The state of a server's job in the engine's process: its data and settings, its handle, checkpoints."""

from collections import deque
from dataclasses import dataclass, field

from coserve.core.job_status import JobStatus
from coserve.engine.best_checkpoint import BestCheckpoint
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.engine.scoring import Scoring
from coserve.train.checkpoint import Checkpoint
from coserve.train.job import PreparedJob
from coserve.wire.messages import JobEnded, JobSpec


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
    """A job, the engine of its base, and those of its events that are reported.

    `handle` is set once it trains or waits for bytes (`waits`). `noted` is the number of its notes that are
    reported; `starved` tells whether its starvation is. `best` follows its validation where that decides
    which checkpoint is the result; `compared` are the log-probabilities under what validation compares with,
    once they are known. `ending` is its last event, reported after its checkpoints; `again`
    restarts it after that.
    """

    spec: JobSpec
    engine: Engine
    last: float  # time of its last step, on the engine's clock
    best: BestCheckpoint | None = None
    prepared: PreparedJob | None = None
    compared: list[float] = field(default_factory=list)
    handle: FineTuning | None = None
    waits: bool = False
    noted: int = 0
    starved: bool = False
    step: int = 0
    kept: int = 0  # the newest step whose state was passed on to be written
    pending: deque[PendingCheckpoint] = field(default_factory=deque)
    stop: JobStatus | None = None  # stop requested while its data was read
    ending: JobEnded | None = None
    again: JobSpec | None = None


def leave_unscored(job: ServedJob) -> None:
    """Stops scoring a job's checkpoints, so that they are reported as soon as they are written."""
    for pending in job.pending:
        if pending.scoring is not None:
            pending.scoring.cancel()
            pending.scoring = None
