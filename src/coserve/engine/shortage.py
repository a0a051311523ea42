"""What goes wrong in a job's own rows is that job's alone: memory that runs out, and anything else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coserve.core.contained import contained
from coserve.errors import CoserveError, JobError, OutOfMemory
from coserve.memory.exhausted import is_out_of_memory


class Shortages:
    """Jobs that have failed, or run out of memory, since they were last asked for. `free(job)` gives back
    what such a job's rows hold: whoever comes next may need it."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self._free = free
        self._failed: dict[str, CoserveError] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._failed

    @contextmanager
    def of(self, job: str) -> Iterator[None]:
        """What happens in here is done for `job`: where memory runs out, or anything else goes wrong, the job
        has failed, and nobody else notices. The allocator's own words are kept, what it held on to is not."""
        failure: CoserveError | None = None
        try:
            yield
        except BaseException as error:
            if is_out_of_memory(error):
                words = str(error).partition("\n")[0] or type(error).__name__
                failure = OutOfMemory(f"job {job} ran out of memory: {words}")
            else:
                failure = contained(error, f"job {job}", JobError)
        if failure is not None:  # not before: the error holds the frames, and these what they computed
            self._failed[job] = failure
            self._free(job)

    def take(self) -> dict[str, CoserveError]:
        """Those since the last time."""
        found, self._failed = self._failed, {}
        return found
