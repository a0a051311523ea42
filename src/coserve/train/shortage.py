"""A failure in a job's rows, lack of memory or any other, fails that job alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coserve.core.contained import contained
from coserve.errors import CoserveError, JobError, OutOfMemory, PassFailed
from coserve.memory.exhausted import contains, is_out_of_memory, words_of
from coserve.train.pause import LayerAbandoned


class Shortages:
    """Jobs that have failed, or run out of memory, since the last `take`. `free(job)` frees the memory of
    such a job's rows, which the next job may need."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self._free = free
        self._failed: dict[str, CoserveError] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._failed

    @contextmanager
    def of(self, job: str) -> Iterator[None]:
        """Surrounds work for `job`: if memory runs out, or any other error is raised, this job fails and
        others are not affected. The allocator's message is kept, the tensors of the failed frames are not. An
        abandoned layer and a failed pass are nobody's failure, and raised."""
        failure: CoserveError | None = None
        try:
            yield
        except (LayerAbandoned, PassFailed):
            raise
        except BaseException as error:
            if not (contains() or isinstance(error, CoserveError)):
                raise  # other ranks' jobs may not have failed
            if is_out_of_memory(error):
                failure = OutOfMemory(f"job {job} ran out of memory: {words_of(error)}")
            else:
                failure = contained(error, f"job {job}", JobError)
        if failure is not None:  # after the error, whose frames hold their tensors
            self._failed[job] = failure
            self._free(job)

    def take(self) -> dict[str, CoserveError]:
        """Removes and returns the failed jobs and their errors."""
        found, self._failed = self._failed, {}
        return found
