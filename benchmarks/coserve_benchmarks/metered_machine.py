"""A machine of predicted seconds in real time: plans, their results and the host are real, the device is a
clock.

What the host takes to plan, launch and apply counts as on a machine with a device, and so does that plans
are made ahead. A device of the tables' seconds runs beside it: each plan begins when it was launched and the
plan before it has ended, and `collect` sleeps until it would be done.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Final

from coserve.core.events import Event
from coserve.core.plan import BasePlan, BaseResult, StepResult, TrainingSegment
from coserve.core.request import BASE
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.replay import Pressing, nobody
from coserve.simulate.simulated import SimulatedExecutor
from coserve.simulate.times import Times

_NAP: Final = 0.001  # seconds of a rest at once, as a worker's

clock, processor = time.perf_counter, time.thread_time


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """Times at which the device `ended` a step, and at which the host has `seen` that. `held_up` are the
    seconds in between that are the system's: it woke this process late, or others had its processor."""

    ended: float
    seen: float
    held_up: float


class MeteredExecutor(SimulatedExecutor):
    """Runs plans in real time. `now` is when the device is free, on the clock `time.perf_counter`.

    `seconds` gives a plan's duration, of which a step takes the next `factor`. `idle` are the seconds in
    which the device waited for a plan, `steps` those that were collected. A pause, also one that was
    announced for the time `pause_at`, stops training behind the slice that the device is at.
    """

    def __init__(
        self,
        seconds: Callable[[BasePlan], float],
        factor: Callable[[], float] = lambda: 1.0,
        interference: tuple[float, float] = (2.0, 2.0),
        swap_pages: int = 0,
        swap_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__(
            lambda plan: seconds(plan) * self._factor,
            interference=interference,
            swap_pages=swap_pages,
            swap_seconds=swap_seconds,
        )
        self.now = clock()
        self.idle = 0.0
        self.steps: list[CollectedStep] = []
        self._own_since = (self.now, processor())  # when a plan was last collected, on both clocks
        self.pause_at = float("inf")
        self._draw, self._factor = factor, 1.0
        self._launched_at: deque[float] = deque()
        self._asked = Condition()

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""
        self._launched_at.append(clock())
        super().launch(plan)

    def pause_training(self) -> None:
        """See `Executor`."""
        with self._asked:
            self.pause_at = min(self.pause_at, clock())
            self._asked.notify()

    def resume_training(self) -> None:
        """See `Executor`."""
        self.pause_at = float("inf")

    def _run(self, plan: BasePlan) -> BaseResult:
        begins = max(self.now, self._launched_at.popleft())
        if not plan.is_empty:
            self.idle += begins - self.now
        self.now, self._factor = begins, self._draw()
        return super()._run(plan)

    def _time(self, plan: BasePlan) -> tuple[float, tuple[TrainingSegment, ...], tuple[float, float]]:
        """See `VirtualClock`. A step that can be paused is over when this returns."""
        self._pausing = False
        timed = super()._time(plan)
        if not (plan.pausable and plan.training) or not self._is_paused_before(self.now + timed[0]):
            return timed
        answering = self._seconds(BasePlan(plan.inference, passes=plan.passes)) if plan.inference else 0.0
        training = max(timed[0] - answering, 1e-9)
        passed = max(self.pause_at - self.now - answering, 0.0) / training
        self.layers_before_pause = int(passed * sum(len(segment.span) for segment in plan.training)) + 1
        self._pausing = True
        return super()._time(plan)

    def _is_paused_before(self, end: float) -> bool:
        """Waits until `end`, or until training is to pause; tells whether it is."""
        with self._asked:
            while (left := min(end, self.pause_at) - clock()) > 0:
                self._asked.wait(left)
            return self.pause_at < end

    def _end(self, plan: BasePlan, seconds: float, host: float) -> None:
        self.now += seconds + min(plan.idle, _NAP)
        (since, used), begun = self._own_since, clock()
        if begun < self.now:
            time.sleep(self.now - begun)
            stolen = clock() - self.now
        else:  # the host was busy, or wanted to be
            stolen = begun - since - (processor() - used)
        ended = clock()
        late = max(ended - self.now, 0.0)
        self.steps.append(CollectedStep(self.now, ended, min(max(stolen, 0.0), late)))
        self._own_since = ended, processor()


class MeteredMachine(SimulatedMachine):
    """A target for loads whose time is real. It is a server, whose training arrivals stop, and plans up to
    `plans_ahead` steps while one runs."""

    executor: MeteredExecutor

    def __init__(
        self,
        policy: str,
        times: Times,
        settings: MachineSettings = MachineSettings(),
        seed: int = 0,
        plans_ahead: int = 1,
    ) -> None:
        super().__init__(policy, times, settings, seed)
        self.executor.plans_ahead = plans_ahead

    def clock(self) -> float:
        """Real seconds."""
        return clock()

    def wait(self, seconds: float) -> None:
        """Sleeps, at most for a moment."""
        time.sleep(min(_NAP, seconds))

    def step(self, pressing: Pressing = nobody) -> list[Event]:
        """One step of the engine's loop. A request that arrives during it and does not bear its time stops
        its training."""
        executor, scheduler = self.executor, self.scheduler
        if not scheduler.under_way:
            executor.launch(scheduler.plan(clock()).only)
        while scheduler.under_way <= executor.plans_ahead and (ahead := scheduler.plan_ahead(clock())):
            executor.launch(ahead.only)
        executor.pause_at = pressing(scheduler.seconds_under_way)
        result = executor.collect()
        assert result is not None, "a plan was launched"
        applied = scheduler.apply(StepResult({BASE: result}), clock())
        return self._go_on_with([event for events in applied.values() for event in events])

    def _executor(self, stages: int, interference: tuple[float, float]) -> MeteredExecutor:
        return MeteredExecutor(self._times.predict, self._factor, interference)
