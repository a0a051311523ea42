"""A machine of predicted seconds: the real scheduler, an executor without a model, and a clock that jumps.

Rounds of hundreds of requests take seconds instead of hours, so policies can be compared at any load, with
intervals. How far this is from a machine is for real rounds to tell.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from math import exp
from typing import Any, Final

from coserve.core.events import Event, StepDone
from coserve.core.plan import Plan, WeightReads
from coserve.core.request import Request
from coserve.core.sequence import MicroBatch
from coserve.core.sequence import Sequence as Answer
from coserve.executors.scripted import ScriptedExecutor
from coserve.memory.pages import PagePool
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.train.example import pack
from coserve.workload.requests import TimedJob, TimedRequest
from coserve_benchmarks.ours import CACHE_TOKENS, greedy

_PAGE: Final = 16
_VOCABULARY: Final = 1000

# Seconds per unit, chosen and not fitted: near the 255M shape in bfloat16 on two cores (40 GB/s, 850
# GFLOP/s). 16 decode rows take 32 ms (33 to 42 measured), a prompt of 256 tokens 0.15 s, an optimizer step
# of 2,048 tokens in one window 3.8 s (4.7 measured, in 225 steps).
TWO_CORES: Final[Mapping[str, float]] = {
    "step": 1.5e-3,
    "forward_layers": 1.4e-2,
    "forward_rows": 5.0e-4,
    "tail_rows": 1.2e-4,
    "decode_context": 1.5e-6,
    "forward_attention": 2.0e-7,
    "adapters": 6e-4,
    "backward_layers": 1.4e-2,
    "backward_rows": 9.0e-4,
    "backward_attention": 5.0e-7,
    "loss_rows": 2.6e-4,
    "updates": 4e-2,
}


@dataclass(frozen=True, slots=True)
class Jitter:
    """Deviation of a machine's steps from their predictions: a lognormal factor of this standard deviation,
    and a `share` of steps that take `longer` times as long."""

    deviation: float = 0.05
    share: float = 0.01
    longer: float = 1.6

    def draw(self, source: random.Random) -> float:
        """The factor of one step."""
        return exp(source.gauss(0.0, self.deviation)) * (self.longer if source.random() < self.share else 1.0)


class SimulatedMachine:
    """A target for loads (`drive.LoadTarget`) whose steps take predicted seconds.

    `weights` are the true seconds per unit of `CostModel`'s features, which its scheduler knows but for
    `jitter`. The host adds `host` seconds a step, with the same jitter. An `interruptible` machine is a
    server: a request that arrives during a step pauses its training at the next boundary between layers. Its
    cost model has seen `known` steps of each kind when a load begins. `streamed` are the bytes that a pass
    over all layers reads, and bytes a second; without them the base stays in memory.
    """

    def __init__(
        self,
        policy: str,
        weights: Mapping[str, float] = TWO_CORES,
        layers: int = 16,
        jitter: Jitter = Jitter(),
        seed: int = 0,
        interruptible: bool = False,
        host: float = 0.0,
        known: int = 32,
        streamed: tuple[int, float] | None = None,
        **scheduler: Any,
    ) -> None:
        truth, cost, self._arithmetic = CostModel(weights), CostModel(weights), CostModel(weights)
        draw = random.Random(seed)
        if streamed is not None:
            for model in (truth, cost):
                model.reads.start(range(layers), *streamed)
        for trains in (False, True) * known:
            cost.misses.observe(jitter.draw(draw), trains)
        config = SchedulerConfig(layers, 4096, interruptible=interruptible, **scheduler)
        pages = PagePool(CACHE_TOKENS // _PAGE, _PAGE)
        self.scheduler = Scheduler(config, pages, cost, make_policy(policy))
        self.executor = ScriptedExecutor(
            _PAGE,
            lambda plan: self._time(plan, jitter.draw(draw)),
            _VOCABULARY,
            host=lambda: host * jitter.draw(draw) if host else 0.0,
            checks_pages=False,  # half of a round's time
            reads=self._take_reads,
        )
        self._truth, self._reads = truth, WeightReads()
        self._predict = truth.predict
        self._layers = layers
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
        return self.scheduler.submit(asked, self.clock())

    def cancel(self, answer: Answer) -> None:
        """Ends an answer."""
        self.scheduler.cancel(answer.key)

    def start(self, job: TimedJob) -> Callable[[], None]:
        """Starts a job; what is returned cancels it."""
        name = f"{job.adapter}-{next(self._numbers)}"
        self._steps[name], self._weights[name] = _optimizer_steps(job), job.weight
        self._go_on(name)
        return lambda: self._stop(name)

    def step(self, arrival: float = float("inf")) -> list[Event]:
        """One step, during which the next request arrives if it takes until then."""
        events = self._launch(arrival) if self.scheduler.config.interruptible else self._run()
        for event in events:
            if isinstance(event, StepDone) and event.job in self._steps:
                self._go_on(event.job)
        return events

    def _time(self, plan: Plan, factor: float) -> float:
        """Seconds of a plan that take `factor` times those predicted, and notes what it reads meanwhile."""
        reads, seconds = self._truth.reads, self._predict(plan) * factor
        if reads.layers:
            visits = Features.of(plan).visits(reads.layers)
            waited = max(seconds - self._arithmetic.predict(plan) * factor, 0.0)
            self._reads = WeightReads(int(visits * reads.nbytes), reads.seconds(visits) * factor, waited)
        return seconds

    def _take_reads(self) -> WeightReads:
        """Reads of the step that has just run."""
        taken, self._reads = self._reads, WeightReads()
        return taken

    def _run(self) -> list[Event]:
        return self.executor.step(self.scheduler)

    def _launch(self, arrival: float) -> list[Event]:
        """A step that an arrival stops: as many layers of its training run as take until then."""
        executor, scheduler = self.executor, self.scheduler
        plan = scheduler.plan(executor.now)
        executor.launch(plan)
        layers = sum(len(segment.span) for segment in plan.training)
        training = self._predict(plan) - self._predict(Plan(inference=plan.inference))
        left = arrival - executor.now - (self._predict(plan) - training)
        if plan.pausable and layers and left < training:
            executor.layers_before_pause = int(max(left, 0.0) / training * layers) + 1 if training else 1
            executor.pause_training()
        result = executor.collect()
        assert result is not None, "the step was launched"
        executor.resume_training()
        return scheduler.apply(result, executor.now)

    def _go_on(self, name: str) -> None:
        """Gives a job its next optimizer step, if one is left."""
        for groups in islice(self._steps[name], 1):
            batches = [
                MicroBatch(self.scheduler.new_key(), name, f"{name}@0", lengths, self._layers)
                for lengths in groups
            ]
            if self._truth.reads.layers:  # memory bears whole micro-batches under any policy
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
