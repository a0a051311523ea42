"""Schedules on a scripted clock, written down as timetables that can be worked out by hand.

A step that answers takes a second, whatever is in it. A micro-batch takes three: one there, two back; the way
through the tail and the optimizer take no time. So an iteration of one micro-batch has t_f = 3 seconds. Two
micro-batches of a job travel together: one second there, four back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coserve.core.events import StepDone
from coserve.core.plan import BasePlan
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.schedule.policies import Policy, make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor
from steps import apply

DEPTH, PAGE = 2, 4
COSTS = dict.fromkeys(DEFAULT_WEIGHTS, 0.0) | {"forward_layers": 1.0, "backward_layers": 2.0}
NEVER = float("inf")
NO_BOUNDS = SLO()


@dataclass(frozen=True)
class Ask:
    """A request: when it arrives, how many tokens it wants, and when somebody cancels it."""

    at: float
    tokens: int
    slo: SLO = NO_BOUNDS
    prompt: int = 1
    cancelled: float = NEVER


@dataclass(frozen=True)
class Tune:
    """A job: when it arrives, its optimizer steps, what is in each, and when somebody takes it away."""

    at: float = 0.0
    steps: int = 1000
    micro_batches: int = 1
    rows: int = 4  # of a micro-batch
    removed: float = NEVER


def play(
    policy: str | Policy,
    asks: Mapping[str, Ask],
    tunes: Mapping[str, Tune],
    until: float = NEVER,
    pages: int = 64,
    **config: object,
) -> list[str]:
    """The timetable of a policy: when each step, iteration or wait began, and what it was."""
    world = World(make_policy(policy) if isinstance(policy, str) else policy, asks, tunes, pages, **config)  # type: ignore[arg-type]
    world.run(until)
    return world.lines


def table(text: str) -> list[str]:
    """A timetable as it is written in a test: a line for each entry, and comments."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [" ".join(line) for line in lines if line]


class World:
    """Brings requests and jobs at their times, and writes down what each step does in `lines`."""

    def __init__(
        self,
        policy: Policy,
        asks: Mapping[str, Ask],
        tunes: Mapping[str, Tune],
        pages: int = 64,
        costs: Mapping[str, float] = COSTS,
        **config: object,
    ) -> None:
        settings: dict[str, object] = {"layers": DEPTH, "max_positions": 64, "starvation": None} | config
        self.lines: list[str] = []
        self.sequences: dict[str, Sequence] = {}
        self.it = Scheduler(
            BaseCache(SchedulerConfig(**settings), PagePool(pages, PAGE)), CostModel(costs), policy
        )  # type: ignore[arg-type]
        self.executor = ScriptedExecutor(PAGE, CostModel(costs).predict)
        self._asks, self._tunes = asks, tunes
        self._steps: dict[str, int] = {}  # optimizer steps that were given, by job
        self._iteration = ""  # the one that had the newest step to itself

    def run(self, until: float) -> None:
        """Steps until nothing is left to do, or to the first step that would begin at `until` or later."""
        idle = 0  # steps in a row that took no time
        while self.executor.now < until:
            assert idle < 20, f"steps that do nothing, at {self.executor.now:g} after {self.lines[-3:]}"
            begun = self.executor.now
            self._arrive(begun)
            if self.it.has_work:
                self._step(begun)
            elif (coming := self._next_arrival()) < until:
                self.executor.now = coming
            else:
                self.lines.append(f"{self.executor.now:g} end")
                return
            idle = 0 if self.executor.now > begun else idle + 1

    def _arrive(self, now: float) -> None:
        for name, ask in self._asks.items():
            if ask.at <= now and name not in self.sequences:
                sampling = SamplingParams(max_tokens=ask.tokens)
                request = Request(name, (1,) * ask.prompt, sampling, slo=ask.slo, arrival=ask.at)
                self.sequences[name] = self.it.requests.submit(request, now)
            if ask.cancelled <= now:
                self.it.requests.cancel(self.sequences[name].key)
        for name, tune in self._tunes.items():
            if tune.at <= now and name not in self._steps:
                self._feed(name)
            if tune.removed <= now:
                self.it.training.remove(name)

    def _next_arrival(self) -> float:
        asks = [ask.at for name, ask in self._asks.items() if name not in self.sequences]
        tunes = [tune.at for name, tune in self._tunes.items() if name not in self._steps]
        return min([*asks, *tunes], default=NEVER)

    def _feed(self, job: str) -> None:
        tune = self._tunes[job]
        self._steps[job] = self._steps.get(job, 0) + 1
        if self._steps[job] <= tune.steps:
            keys = [self.it.new_key() for _ in range(tune.micro_batches)]
            self.it.training.add(job, [MicroBatch(key, job, f"{job}@0", (tune.rows,), DEPTH) for key in keys])

    def _step(self, now: float) -> None:
        plan = self.it.plan(now).only
        # Who arrives ends a pause: an engine looks out for them while it waits.
        plan = replace(plan, idle=min(plan.idle, self._next_arrival() - now))
        self._write(now, plan)
        result = self.executor.run(plan)
        for event in apply(self.it, result, self.executor.now):
            if isinstance(event, StepDone):
                self._feed(event.job)

    def _write(self, now: float, plan: BasePlan) -> None:
        jobs = {s.job for s in plan.training} | {update.job for update in plan.updates}
        iteration = ", ".join(f"{job} {self._steps[job]}" for job in sorted(jobs))
        if iteration and iteration != self._iteration:
            self._note(now, plan, f"train {' '.join(sorted(jobs))}")
        elif plan.inference:
            self._note(now, plan)
        elif plan.is_empty:
            self.lines.append(f"{now:g} wait")
        if iteration or plan.inference:
            self._iteration = "" if plan.inference else iteration

    def _note(self, now: float, plan: BasePlan, *training: str) -> None:
        by_key = {sequence.key: sequence.request for sequence in self.sequences.values()}
        decoding, filling = [], []
        for segment in plan.inference:
            request = by_key[segment.key]
            (decoding if segment.start >= len(request.prompt) else filling).append(request.id)
        parts = [f"decode {' '.join(decoding)}"] * bool(decoding)
        parts += [f"prefill {' '.join(filling)}"] * bool(filling)
        self.lines.append(f"{now:g} {', '.join([*parts, *training])}")
