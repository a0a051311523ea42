"""States of a fine-tuning job, the same from API to engine, and the moves between them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class JobStatus(StrEnum):
    """Status of a job: queued, running, paused with a checkpoint, or final."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Tells whether the job is over."""
        return self in FINAL

    def may_become(self, after: "JobStatus") -> bool:
        """Tells whether the status may change to `after`, or is `after`."""
        return after is self or after in _MOVES[self]


UNFINISHED: Final = (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED)
FINAL: Final = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)
# A running job is queued again where its engine ended or gave it back. A failed one that was quarantined may
# be released, and is paused then.
_MOVES: Final[Mapping[JobStatus, frozenset[JobStatus]]] = {
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.PAUSED, *FINAL}),
    JobStatus.RUNNING: frozenset({JobStatus.QUEUED, JobStatus.PAUSED, *FINAL}),
    JobStatus.PAUSED: frozenset({JobStatus.QUEUED, *FINAL}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset({JobStatus.PAUSED}),
    JobStatus.CANCELLED: frozenset(),
}
