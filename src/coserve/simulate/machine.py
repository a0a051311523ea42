"""A machine of predicted seconds: the real scheduler, an executor without a model, and a clock that jumps.

Runs of hundreds of requests take seconds instead of hours, so policies can be compared at any load and on
hardware that is elsewhere. How far this is from a machine is for `coserve simulate --check` to tell.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, Final

from coserve.core.events import Event, StepDone
from coserve.core.plan import BasePlan, WeightReads
from coserve.core.request import Request
from coserve.core.sequence import MicroBatch
from coserve.core.sequence import Sequence as Answer
from coserve.jobs.packing import pack
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.simulate.jitter import Jitter
from coserve.simulate.pipelined import PipelinedExecutor
from coserve.simulate.replay import Pressing, nobody
from coserve.simulate.simulated import SimulatedExecutor
from coserve.simulate.times import Times
from coserve.workload.requests import TimedJob, TimedRequest, greedy

PAGE_SIZE: Final = 16
POSITIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Settings of a machine beside its seconds.

    Keys and values of `cache_tokens` tokens fit. The scheduler's cost model has seen `known` steps of each
    kind when a load begins. `interference` is the slowdown of inference and of training on half of the
    machine each, which it knows; None is twice, which it does not. `scheduler` are further fields of
    `SchedulerConfig`; an `interruptible` machine is a server: a request that arrives during a step pauses
    its training between two slices. A pipeline of several `stages` is not interruptible.
    """

    cache_tokens: int = 16384
    positions: int = POSITIONS
    jitter: Jitter = field(default_factory=Jitter)
    known: int = 32
    stages: int = 1
    interference: tuple[float, float] | None = None
    scheduler: dict[str, Any] = field(default_factory=dict)


class SimulatedMachine:
    """A target for loads (`replay.LoadTarget`) whose steps take the seconds of `times` but for jitter."""

    def __init__(
        self, policy: str, times: Times, settings: MachineSettings = MachineSettings(), seed: int = 0
    ) -> None:
        draw, jitter = random.Random(seed), settings.jitter
        self._times, self._reads = times, WeightReads()
        self._factor = partial(jitter.draw, draw)
        self.executor = self._executor(settings.stages, settings.interference or (2.0, 2.0))
        overlap = self.executor.overlap
        config = SchedulerConfig(times.layers, settings.positions, overlap=overlap, **settings.scheduler)
        known = times.known()
        if settings.interference is not None:
            known.interference.start(*settings.interference)
        pages = PagePool(settings.cache_tokens // PAGE_SIZE, PAGE_SIZE)
        self.scheduler = Scheduler(BaseCache(config, pages), known, make_policy(policy))
        self.scheduler.cost.host = times.known_host
        for trains in (False, True) * settings.known:
            self.scheduler.cost.misses.observe(jitter.draw(draw), trains)
        self._is_streamed = bool(known.reads.layers)
        self._steps: dict[str, Iterator[list[tuple[int, ...]]]] = {}
        self._weights: dict[str, float] = {}
        self._numbers = count(1)

    def clock(self) -> float:
        """Simulated seconds."""
        return self.executor.now

    def wait(self, seconds: float) -> None:
        """Lets time pass between two steps."""
        self.executor.skip(seconds)

    def ask(self, request: TimedRequest, arrival: float) -> Answer:
        """Submits a request."""
        name, adapter = str(next(self._numbers)), request.adapter and f"{request.adapter}@1"
        asked = Request(name, request.prompt, greedy(request.answer), adapter, request.slo, arrival)
        return self.scheduler.requests.submit(asked, self.clock())

    def cancel(self, answer: Answer) -> None:
        """Ends an answer."""
        self.scheduler.requests.cancel(answer.key)

    def start(self, job: TimedJob) -> Callable[[], None]:
        """Starts a job; what is returned cancels it."""
        name = f"{job.adapter}-{next(self._numbers)}"
        self._steps[name], self._weights[name] = _optimizer_steps(job), job.weight
        self._go_on(name)
        return partial(self._stop, name)

    def step(self, pressing: Pressing = nobody) -> list[Event]:
        """One step, during which the next request that stops training arrives if it takes until then."""
        interruptible = self.scheduler.config.interruptible
        return self._go_on_with(
            self._launch(pressing) if interruptible else self.executor.step(self.scheduler)
        )

    def _executor(self, stages: int, interference: tuple[float, float]) -> SimulatedExecutor:
        if stages == 1:
            return SimulatedExecutor(
                self._time, self._host, reads=self._take_reads, interference=interference
            )
        return PipelinedExecutor(
            stages, lambda plan: self._times.by_stage(plan).times(self._factor()), self._host
        )

    def _host(self) -> float:
        """Seconds of the host beside a step."""
        return self._times.host * self._factor() if self._times.host else 0.0

    def _time(self, plan: BasePlan) -> float:
        """Seconds of a plan, and notes what it reads meanwhile."""
        factor = self._factor()
        if self._is_streamed:
            self._reads = self._times.reads(plan, factor)
        return self._times.predict(plan) * factor

    def _take_reads(self) -> WeightReads:
        """Reads of the step that has just run."""
        taken, self._reads = self._reads, WeightReads()
        return taken

    def _launch(self, pressing: Pressing) -> list[Event]:
        """A step that an arrival stops: as many layers of its training run as take until then."""
        executor, scheduler, predict = self.executor, self.scheduler, self._times.predict
        plan = scheduler.plan(executor.now).only
        executor.launch(plan)
        arrival = pressing(scheduler.seconds_under_way) if plan.pausable and plan.training else float("inf")
        if arrival < float("inf"):
            layers = sum(len(segment.span) for segment in plan.training)
            inference = predict(BasePlan(inference=plan.inference))
            training = predict(plan) - inference
            left = arrival - executor.now - inference
            if layers and training > 0 and left < training:  # the loss may take no seconds by a table
                executor.layers_before_pause = int(max(left, 0.0) / training * layers) + 1
                executor.pause_training()
        result = executor.collect()
        assert result is not None, "the step was launched"
        executor.resume_training()
        return executor.apply(scheduler, result)

    def _go_on_with(self, events: list[Event]) -> list[Event]:
        """Gives jobs that have stepped their next work; returns the events."""
        for event in events:
            if isinstance(event, StepDone) and event.job in self._steps:
                self._go_on(event.job)
        return events

    def _go_on(self, name: str) -> None:
        """Gives a job its next optimizer step, if one is left."""
        for groups in islice(self._steps[name], 1):
            batches = [
                MicroBatch(self.scheduler.new_key(), name, f"{name}@0", lengths, self._times.layers)
                for lengths in groups
            ]
            if self._is_streamed:  # memory bears whole micro-batches under any policy
                rows = max(batch.length for batch in batches)
                self.scheduler.window_rows = max(self.scheduler.window_rows, rows)
            self.scheduler.training.add(name, batches, self._weights[name])
            return
        self._stop(name)

    def _stop(self, name: str) -> None:
        self._steps.pop(name, None)
        self.scheduler.training.remove(name)


def _optimizer_steps(job: TimedJob) -> Iterator[list[tuple[int, ...]]]:
    """Lengths of the examples of each micro-batch, optimizer step by optimizer step."""
    lengths = [len(example) for example in job.examples]
    for _ in range(job.epochs):
        for first in range(0, len(lengths), job.batch):
            taken = lengths[first : first + job.batch]
            yield [tuple(taken[index] for index in group) for group in pack(taken, job.rows)]
