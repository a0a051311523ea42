"""Replays a workload on an engine in this process, timed by the wall clock."""

from collections.abc import Callable

from coserve.engine.engine import Engine
from coserve.simulate import driven
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import TimedJob, Workload
from coserve_benchmarks.ours import start_job


class EngineTarget(driven.EngineTarget):
    """An engine in this process that trains a workload's jobs."""

    def start(self, job: TimedJob) -> Callable[[], None]:
        """See `LoadTarget`."""
        return start_job(self.engine, job).cancel


def serve(engine: Engine, workload: Workload, patience: float = float("inf")) -> LoadResult:
    """Replays a workload on an engine in this process; see `replay`."""
    return replay(EngineTarget(engine), workload, patience)
