"""A pipeline without a model: stages that hold a part of the layers each, with several plans under way.

A plan's rows pass forward through all stages, then its losses and windows back through them in the other
order (PipeDream's and GPipe's stages). While one stage computes for a plan, the others do for those before
and after it. What goes one way keeps the order of the plans in every stage, as rows attend to those of
earlier plans; what goes forward, with answers in it, is first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final

from coserve.core.plan import BasePlan, BaseResult, TrainingSegment
from coserve.core.sequence import Direction
from coserve.schedule.overlap import Overlap
from coserve.simulate.simulated import SimulatedExecutor

_BACK: Final = (Direction.LOSS, Direction.BACKWARD)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a plan in each stage, on its way forward (answers, the head) and back (losses, windows going
    back, optimizer steps), and from one stage to the next on either way."""

    forward: tuple[float, ...]
    back: tuple[float, ...]
    sending: float = 0.0
    returning: float = 0.0

    @property
    def there(self) -> float:
        """Seconds of the way forward of a plan which never waits for another."""
        return sum(self.forward) + (len(self.forward) - 1) * self.sending

    @property
    def again(self) -> float:
        """Seconds of its way back."""
        return sum(self.back) + (len(self.back) - 1) * self.returning

    @property
    def total(self) -> float:
        """Seconds of both ways."""
        return self.there + self.again

    def times(self, factor: float) -> "StageSeconds":
        """All of it `factor` times as long."""
        forward, back = (tuple(factor * one for one in way) for way in (self.forward, self.back))
        return StageSeconds(forward, back, factor * self.sending, factor * self.returning)


class Passing:
    """A plan on its way through a pipeline. `longest` are the seconds of the longest plan under way with it.

    `ready` is when the plans before it had left the first stage, `begun` when that began with it, `there`
    when it had gone forward, `ended` when it had come back.
    """

    def __init__(self, taken: StageSeconds, entered: float) -> None:
        self.taken, self.entered, self.longest = taken, entered, taken.total
        self.ready = self.begun = entered
        self.there: float | None = None
        self.ended: float | None = None


class Pipeline:
    """The stages, each of which does one thing after the other: what goes forward first, in the order of the
    plans, and what goes back while nothing else is there."""

    def __init__(self, stages: int) -> None:
        self.now = 0.0
        self._forward = [deque[Passing]() for _ in range(stages)]
        self._back = [deque[Passing]() for _ in range(stages)]
        self._arrivals = [[0.0] * stages for _ in range(2)]  # of the newest plan, by way and stage
        self._busy = [False] * stages
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._left = 0.0  # when the newest plan left the first stage

    def enter(self, now: float, taken: StageSeconds) -> Passing:
        """Has a plan enter at `now`, behind all others."""
        plan = Passing(taken, now)
        self._at(now, lambda: self._arrive(plan, 0, self._forward))
        return plan

    def until(self, is_reached: Callable[[], bool]) -> float:
        """Goes on until something is reached; the time at which it is."""
        while not is_reached():
            self.now, _, happens = heappop(self._events)
            happens()
        return self.now

    def _arrive(self, plan: Passing, stage: int, line: list[deque[Passing]]) -> None:
        line[stage].append(plan)
        self._serve(stage)

    def _serve(self, stage: int) -> None:
        """Has an idle stage begin with the next plan."""
        while not self._busy[stage] and (line := self._next_line(stage)) is not None:
            plan = line[stage].popleft()
            if not stage and line is self._forward:
                plan.ready, plan.begun = max(plan.entered, self._left), self.now
            way = plan.taken.forward if line is self._forward else plan.taken.back
            if way[stage]:
                self._busy[stage] = True
                self._at(self.now + way[stage], partial(self._finish, plan, stage, line))
            else:
                self._go_on(plan, stage, line)

    def _next_line(self, stage: int) -> list[deque[Passing]] | None:
        return next((line for line in (self._forward, self._back) if line[stage]), None)

    def _finish(self, plan: Passing, stage: int, line: list[deque[Passing]]) -> None:
        self._busy[stage] = False
        self._go_on(plan, stage, line)
        self._serve(stage)

    def _go_on(self, plan: Passing, stage: int, line: list[deque[Passing]]) -> None:
        """Has a plan leave a stage, for the next one on its way."""
        taken, last = plan.taken, len(self._busy) - 1
        if not stage and line is self._forward:
            self._left = self.now
        if line is self._forward and stage < last:
            self._send(plan, stage + 1, line, taken.sending)
        elif line is self._forward:
            plan.there = self.now
            if any(taken.back):
                self._at(self.now, partial(self._arrive, plan, last, self._back))
            else:
                plan.ended = self.now
        elif stage:
            self._send(plan, stage - 1, line, taken.returning)
        else:
            plan.ended = self.now

    def _send(self, plan: Passing, stage: int, line: list[deque[Passing]], seconds: float) -> None:
        """Has a plan arrive at another stage in so many seconds, but not before the plans ahead of it."""
        arrivals = self._arrivals[line is self._back]
        arrivals[stage] = max(self.now + seconds, arrivals[stage])
        self._at(arrivals[stage], partial(self._arrive, plan, stage, line))

    def _at(self, then: float, happens: Callable[[], None]) -> None:
        heappush(self._events, (then, next(self._numbers), happens))


class PipelinedExecutor(SimulatedExecutor):
    """Runs plans on a pipeline of `stages` stages, as many of them at once.

    `seconds` are those of a plan by stage. Answers are there when their rows have gone forward. A plan's
    losses and windows on their way back may go on until later results, which report them; a result with an
    optimizer step waits for them. No result comes before the plan so many stages earlier has ended. Training
    is not paused, and does not run beside answers.

    A result's seconds are those of its way forward and of the ways back that it reports, as if it were alone.
    Stages that wait for each other take as long as the longest plan under way, which the scheduler knows;
    where answers come later than that, seconds are as much longer, and so is the margin of predictions.
    """

    def __init__(
        self,
        stages: int,
        seconds: Callable[[BasePlan], StageSeconds],
        host: Callable[[], float] = float,
        observe: Callable[[BasePlan, BaseResult, float], object] = lambda plan, result, began: None,
    ) -> None:
        super().__init__(lambda plan: 0.0, host, Overlap(stages, stages), observe=observe)
        self._stage_seconds, self._pipeline = seconds, Pipeline(stages)
        self._nothing = StageSeconds((0.0,) * stages, (0.0,) * stages)
        self._passing = deque[Passing]()  # of plans under way, whose results have not been collected
        self._going_back = deque[tuple[Passing, BasePlan]]()  # whose ways back no result has told of
        self._earlier = deque[Passing](maxlen=stages)  # of the plans collected last

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`. The plan enters the first stage once that is free."""
        assert plan.share is None, "no share in a pipeline"
        taken = self._nothing if plan.is_empty else self._stage_seconds(plan)
        entered = self._pipeline.enter(self.now, taken)
        others = (*self._passing, *(one for one, _ in self._going_back))
        entered.longest = max(taken.total, *(one.taken.total for one in others), 0.0)
        self._passing.append(entered)
        super().launch(plan)

    def pause_training(self) -> None:
        """See `Executor`. Stages are at different plans, and go on."""

    def _time(self, plan: BasePlan) -> tuple[float, tuple[TrainingSegment, ...], tuple[float, float]]:
        """See `VirtualClock`; advances the clock to when the result is there."""
        own = self._passing[0]
        awaited = [own] if plan.updates else []
        if len(self._earlier) == self._earlier.maxlen:
            awaited.append(self._earlier[0])
        if plan.is_empty and not plan.idle and self._going_back:
            awaited.append(self._going_back[0][0])
        at = self._pipeline.until(
            lambda: own.there is not None and all(one.ended is not None for one in awaited)
        )
        self.now = max(self.now, at)
        trained = [segment for segment in plan.training if segment.direction not in _BACK]
        assert own.there is not None, "that was awaited"
        late = (own.there - own.ready) / own.longest if plan.inference else 0.0
        seconds = own.taken.there * max(late, 1.0)
        if len(trained) < len(plan.training) or any(own.taken.back):
            self._going_back.append((own, plan))
        while self._going_back and self._going_back[0][0].ended is not None:
            passing, done = self._going_back.popleft()
            trained += [segment for segment in done.training if segment.direction in _BACK]
            seconds += passing.taken.again
        return seconds, tuple(trained), (0.0, 0.0)

    def _is_paused(self, plan: BasePlan, trained: tuple[TrainingSegment, ...]) -> bool:
        return False

    def _began(self) -> float:
        return self._passing[0].begun

    def _end(self, plan: BasePlan, seconds: float, host: float) -> None:
        self._earlier.append(self._passing.popleft())
        self.now += plan.idle + host
