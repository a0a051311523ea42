"""Running out of memory inside a job is that job's alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coserve.errors import OutOfMemory
from coserve.memory.exhausted import is_out_of_memory


class Shortages:
    """Jobs that have run out of memory since they were last asked for. `free(job)` gives back what such a
    job's rows hold: whoever comes next may need it."""

    def __init__(self, free: Callable[[str], None]) -> None:
        self._free = free
        self._failed: dict[str, OutOfMemory] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._failed

    @contextmanager
    def of(self, job: str) -> Iterator[None]:
        """What happens in here is done for `job`: where memory runs out the job has failed, and nobody else
        notices. The allocator's own words are kept, what it held on to is not."""
        words = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            words = str(error).partition("\n")[0] or type(error).__name__
        if words is not None:  # not before: the error holds the frames, and these what they computed
            self._failed[job] = OutOfMemory(f"job {job} ran out of memory: {words}")
            self._free(job)

    def take(self) -> dict[str, OutOfMemory]:
        """Those since the last time."""
        found, self._failed = self._failed, {}
        return found
