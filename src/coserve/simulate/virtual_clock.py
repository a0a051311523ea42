"""A virtual clock: how long plans take on a machine of given seconds, with its pauses and its two streams."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

from coserve.core.events import Event
from coserve.core.plan import BasePlan, BaseResult, Moved, StepResult, SwapIn, SwapOut, TrainingSegment
from coserve.core.request import BASE
from coserve.core.sequence import Direction, Span
from coserve.schedule.scheduler import Scheduler

_NAP: Final = 0.001  # seconds that a step without rows waits for a move that never ends


@dataclass(slots=True, eq=False)
class VirtualMove:
    """A copy that takes so many `seconds`, and when that `ends`."""

    plan: SwapOut | SwapIn
    ends: float
    seconds: float
    is_dropped: bool = False


def told(ended: Iterable[VirtualMove], failed: Container[SwapOut | SwapIn] = ()) -> Moved:
    """The part of a result that tells of moves."""
    ways = [[move for move in ended if isinstance(move.plan, way)] for way in (SwapOut, SwapIn)]
    out, back = (tuple(move.plan.copy for move in way) for way in ways)
    lost = tuple(move.plan.copy for move in ended if move.plan in failed)
    written, read = (sum(move.seconds for move in way if not move.is_dropped) for way in ways)
    return Moved(out, back, lost, (written, read))


class VirtualClock(ABC):
    """The clock of an executor without a model. `now` is in seconds; `seconds` gives a plan's duration.

    A call of `pause_training` stops the training of the next pausable plan after the slice in which
    `layers_before_pause` layers are reached. Beside each other answers and training are slower in
    proportion to their shares of the machine, or by `interference` (of answers, of training) on half of it
    each; this training may end in a later step. Pages move to the second tier and back beside steps, one move
    after the other, in `swap_seconds` a page. Where `is_short` is true of a plan, memory runs out in its
    first pass of training, unless windows are alone.
    """

    def __init__(
        self,
        seconds: Callable[[BasePlan], float],
        plans_ahead: int = 0,
        interference: tuple[float, float] = (2.0, 2.0),
        swap_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.now = 0.0
        self.plans_ahead = plans_ahead
        self.layers_before_pause = 1
        self.is_short: Callable[[BasePlan], bool] = lambda plan: False
        self._seconds, self._slower = seconds, interference
        self._pausing = False
        self._launched: deque[BasePlan] = deque()
        self._beside: tuple[TrainingSegment, ...] = ()  # training beside answers
        self._until = 0.0  # when it is done
        self._training = 0.0  # seconds it takes
        self._swap_seconds = swap_seconds
        self._moves: deque[VirtualMove] = deque()  # that no result has told of

    def step(self, scheduler: Scheduler) -> list[Event]:
        """One step of the engine's loop, with up to `plans_ahead` plans made before the results they
        follow."""
        if not scheduler.under_way:
            self.launch(scheduler.plan(self.now).only)
        while scheduler.under_way <= self.plans_ahead and (ahead := scheduler.plan_ahead(self.now)):
            self.launch(ahead.only)
        result = self.collect()
        assert result is not None
        return self.apply(scheduler, result)

    def apply(self, scheduler: Scheduler, result: BaseResult) -> list[Event]:
        """Applies a result of the schedule's only base, at the present time. Returns the events."""
        applied = scheduler.apply(StepResult({BASE: result}), self.now)
        return [event for events in applied.values() for event in events]

    def skip(self, seconds: float) -> None:
        """Advances the clock between two steps."""
        self.now += seconds

    def launch(self, plan: BasePlan) -> None:
        """See `Executor`. The plan runs, and the clock advances, when its result is collected."""
        self._launched.append(plan)

    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""
        return self._run(self._launched.popleft()) if wait and self._launched else None

    @abstractmethod
    def _run(self, plan: BasePlan) -> BaseResult:
        """Runs a plan, and advances the clock."""

    def pause_training(self) -> None:
        """See `Executor`."""
        self._pausing = True

    def resume_training(self) -> None:
        """See `Executor`."""
        self._pausing = False

    def _move(self, plan: BasePlan, seconds: float) -> tuple[float, list[VirtualMove]]:
        """Begins the moves of a plan that takes so many seconds, or as long as a move where its step has no
        rows. Returns its seconds and the moves that end meanwhile."""
        for move in self._moves:
            move.is_dropped |= move.plan.copy in plan.swap_dropped
        for one in plan.moves:
            began = max(self._moves[-1].ends, self.now) if self._moves else self.now
            taken = len(one.pages) * self._swap_seconds[isinstance(one, SwapIn)]
            self._moves.append(VirtualMove(one, began + taken, taken))
        if self._moves and not (plan.has_rows or plan.others_wait):
            left = self._moves[0].ends - self.now
            seconds = max(seconds, left if isfinite(left) else _NAP)
        ended = [move for move in self._moves if move.ends <= self.now + seconds]
        self._moves = deque(move for move in self._moves if move not in ended)
        return seconds, ended

    def _time(self, plan: BasePlan) -> tuple[float, tuple[TrainingSegment, ...], tuple[float, float]]:
        """Seconds of a plan, the training done after it, and the seconds of its streams."""
        if plan.share is None:
            assert not self._beside, "the whole machine, while training runs beside answers"
            plan = replace(plan, training=self._before_pause(plan))
            return (0.0 if plan.is_empty else self._seconds(plan)), plan.training, (0.0, 0.0)
        if plan.training:
            assert not self._beside, "one piece of training beside answers at a time"
            self._beside = plan.training
            slower = self._slower[1] / (2 * (1 - plan.share))
            self._training = self._seconds(BasePlan(training=plan.training)) * slower
            self._until = self.now + self._training
        slower = self._slower[0] / (2 * plan.share)
        answering = self._seconds(BasePlan(plan.inference)) * slower if plan.inference else 0.0
        waited = max(self._until - self.now, 0.0) if self._beside and not plan.inference else 0.0
        if not self._beside or self._until > self.now + answering + waited:
            return answering + waited, (), (answering, 0.0)
        trained, self._beside = self._beside, ()
        return answering + waited, trained, (answering, self._training)

    def _together_failed(self, plan: BasePlan) -> bool:
        """Tells whether memory runs out for windows that share a pass."""
        shared = len(plan.inference) + len(plan.training) > 1 and bool(plan.training)
        return shared and not plan.alone and plan.share is None and self.is_short(plan)

    def _before_pause(self, plan: BasePlan) -> tuple[TrainingSegment, ...]:
        """The slices of a plan's training that run before a pause."""
        if self._together_failed(plan):
            return ()
        if not (self._pausing and plan.pausable):
            return plan.training
        begun = -(-self.layers_before_pause // plan.slice_layers)  # slices
        left, ran = begun * plan.slice_layers, list[TrainingSegment]()
        for segment in plan.training:
            layers = min(left, len(segment.span))
            first, last = segment.span.first, segment.span.last
            going_back = segment.direction is Direction.BACKWARD
            span = Span(last - layers, last) if going_back else Span(first, first + layers)
            if layers:
                ran.append(replace(segment, span=span))
            left -= layers
        return tuple(ran)
