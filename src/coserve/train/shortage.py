"""A failure in a job's rows, lack of memory or any other, fails that job alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from coserve.errors import CoserveError, JobError
from coserve.memory.exhausted import failing_alone


class Shortages:
    """Jobs that have failed, or run out of memory, since the last `take`. `free(job)` frees the memory of
    such a job's rows, which the next job may need."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self._free = free
        self._failed: dict[str, CoserveError] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._failed

    def of(self, job: str) -> AbstractContextManager[None]:
        """Surrounds work for `job`: if memory runs out, or any other error is raised, this job fails and
        others are not affected."""
        return failing_alone(f"job {job}", partial(self._fail, job), JobError)

    def _fail(self, job: str, error: CoserveError) -> None:
        self._failed[job] = error
        self._free(job)

    def take(self) -> dict[str, CoserveError]:
        """Removes and returns the failed jobs and their errors."""
        found, self._failed = self._failed, {}
        return found
