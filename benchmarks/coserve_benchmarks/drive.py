"""Replays a workload on an engine in this process, timed by the wall clock."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coserve.core.events import Event
from coserve.core.sequence import Sequence
from coserve.engine.engine import Engine
from coserve.simulate.replay import LoadResult, replay
from coserve.workload.requests import TimedJob, TimedRequest, Workload, greedy
from coserve_benchmarks.ours import start_job

_NAP = 0.001  # seconds; the wait for an arrival is cut into so many


class EngineTarget:
    """An engine in this process, on the wall's clock. Arrivals pause training, where it is interruptible."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduler = engine.scheduler
        self.clock = engine.clock

    def wait(self, seconds: float) -> None:
        """Sleeps, at most for a moment: a policy may have the engine wake up."""
        time.sleep(min(_NAP, seconds))

    def ask(self, request: TimedRequest, arrival: float) -> Sequence:
        """See `LoadTarget`."""
        sampling = greedy(request.answer)
        return self._engine.generate(request.prompt, request.adapter, sampling, request.slo, arrival).sequence

    def cancel(self, answer: Sequence) -> None:
        """See `LoadTarget`."""
        self.scheduler.requests.cancel(answer.key)

    def start(self, job: TimedJob) -> Callable[[], None]:
        """See `LoadTarget`."""
        return start_job(self._engine, job).cancel

    def step(self, arrival: float = float("inf")) -> list[Event]:
        """See `LoadTarget`."""
        with announced(self._engine, arrival):
            return self._engine.step()


@contextmanager
def announced(engine: Engine, arrival: float) -> Iterator[None]:
    """Announces a request that arrives at `arrival` during the block, as `Engine.generate` on another thread
    does; the caller hands it over after the block."""
    left = arrival - engine.clock()
    if left > 2 * engine.scheduler.config.max_quantum:  # no step that can be paused lasts so long
        yield
        return
    came = threading.Event()

    def announce() -> None:
        engine.arrivals.announce()
        came.set()

    timer = threading.Timer(max(left, 0.0), announce)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if came.is_set():
            engine.arrivals.taken()


def serve(engine: Engine, workload: Workload, patience: float = float("inf")) -> LoadResult:
    """Replays a workload on an engine in this process; see `replay`."""
    return replay(EngineTarget(engine), workload, patience)
