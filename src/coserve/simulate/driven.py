"""An engine in this process as the target of a load, timed by the wall clock."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from coserve.core.events import Event
from coserve.core.sequence import Sequence
from coserve.simulate.replay import Pressing, nobody
from coserve.workload.requests import TimedRequest, greedy

if TYPE_CHECKING:  # which loads torch
    from coserve.engine.engine import Engine

_NAP: Final = 0.001  # seconds; the wait for an arrival is cut into so many


class EngineTarget:
    """The part of a `replay.LoadTarget` that needs no jobs, on an engine and the wall's clock. Arrivals pause
    training, where the engine is interruptible."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.clock = engine.clock

    def wait(self, seconds: float) -> None:
        """Sleeps, at most for a moment: a policy may have the engine wake up."""
        time.sleep(min(_NAP, seconds))

    def ask(self, request: TimedRequest, arrival: float) -> Sequence:
        """See `LoadTarget`."""
        sampling = greedy(request.answer)
        return self.engine.generate(request.prompt, request.adapter, sampling, request.slo, arrival).sequence

    def cancel(self, answer: Sequence) -> None:
        """See `LoadTarget`."""
        self.scheduler.requests.cancel(answer.key)

    def step(self, pressing: Pressing = nobody) -> list[Event]:
        """See `LoadTarget`."""
        with announced(self.engine, pressing):
            return self.engine.step()


@contextmanager
def announced(engine: "Engine", pressing: Pressing) -> Iterator[None]:
    """Announces the request that comes next and may press, if it does and comes during the block, as
    `Engine.generate` on another thread does; the caller hands it over after the block."""
    arrival = pressing(float("inf"))
    left = arrival - engine.clock()
    if left > 2 * engine.scheduler.config.max_quantum:  # no step that can be paused lasts so long
        yield
        return
    came = threading.Event()

    def announce() -> None:
        if pressing(engine.arrivals.under_way) <= arrival:
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
