"""The scheduler's own time for a step, by the number of requests that wait."""

import time
from collections.abc import Sequence
from math import log
from statistics import median
from typing import Final

from coserve.core.request import SLO, Request
from coserve.core.sequence import MicroBatch
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.simulate.simulated import SimulatedExecutor
from coserve.workload.requests import greedy

WAITING: Final = (100, 1000, 10_000)
_LAYERS: Final = 32
_RUNNING: Final = 64
_SETTLED: Final = 16  # steps until all places are taken
_STEPS: Final = 24


class Backlog:
    """A scheduler whose places are taken, with `waiting` requests in its line and a job that trains."""

    def __init__(self, waiting: int, policy: str = "hybrid", slo: SLO = SLO(first_token=30.0)) -> None:
        config = SchedulerConfig(_LAYERS, 4096, max_running=_RUNNING, interruptible=True)
        cost = CostModel()
        self.scheduler = Scheduler(BaseCache(config, PagePool(1 << 20, 16)), cost, make_policy(policy))
        self.executor = SimulatedExecutor(cost.predict)
        for number in range(waiting + _RUNNING):
            asked = Request(str(number), (0,) * 16, greedy(2000), None, slo, number * 1e-6)
            self.scheduler.requests.submit(asked, 0.0)
        batch = MicroBatch(self.scheduler.new_key(), "job", "job@0", (2048,) * 64, _LAYERS)
        self.scheduler.training.add("job", [batch])
        for _ in range(_SETTLED):
            self.executor.step(self.scheduler)

    def step(self) -> None:
        """One step."""
        self.executor.step(self.scheduler)


def step_seconds(waiting: int, policy: str = "hybrid") -> float:
    """Median wall seconds in which the scheduler plans a step and applies its result."""
    backlog = Backlog(waiting, policy)
    found = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        backlog.step()
        found.append(time.perf_counter() - begun)
    return median(found)


def growth(waiting: Sequence[int] = WAITING, policy: str = "hybrid") -> tuple[dict[int, float], float]:
    """Seconds of a step by the number of requests that wait, and their growth from the fewest to the most
    over that of n log n: at most 1 where it is no faster."""
    seconds = {count: step_seconds(count, policy) for count in waiting}
    first, last = min(waiting), max(waiting)
    return seconds, seconds[last] / seconds[first] / (last * log(last) / (first * log(first)))
