"""A virtual clock: how long plans take on a machine of given seconds, with its pauses and its two streams."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from coserve.core.events import Event
from coserve.core.plan import BasePlan, BaseResult, StepResult, TrainingSegment
from coserve.core.request import BASE
from coserve.core.sequence import Direction, Span
from coserve.schedule.scheduler import Scheduler


class VirtualClock(ABC):
    """The clock of an executor without a model. `now` is in seconds; `seconds` gives a plan's duration.

    A call of `pause_training` stops the training of the next pausable plan after the slice in which
    `layers_before_pause` layers are reached. Beside each other answers and training are slower in
    proportion to their shares of the machine, or by `interference` (of answers, of training) on half of it
    each; this training may end in a later step.
    """

    def __init__(
        self,
        seconds: Callable[[BasePlan], float],
        plans_ahead: int = 0,
        interference: tuple[float, float] = (2.0, 2.0),
    ) -> None:
        self.now = 0.0
        self.plans_ahead = plans_ahead
        self.layers_before_pause = 1
        self._seconds, self._slower = seconds, interference
        self._pausing = False
        self._beside: tuple[TrainingSegment, ...] = ()  # training beside answers
        self._until = 0.0  # when it is done
        self._training = 0.0  # seconds it takes

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

    @abstractmethod
    def launch(self, plan: BasePlan) -> None:
        """See `Executor`."""

    @abstractmethod
    def collect(self, wait: bool = True) -> BaseResult | None:
        """See `Executor`."""

    def pause_training(self) -> None:
        """See `Executor`."""
        self._pausing = True

    def resume_training(self) -> None:
        """See `Executor`."""
        self._pausing = False

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

    def _before_pause(self, plan: BasePlan) -> tuple[TrainingSegment, ...]:
        """The slices of a plan's training that run before a pause."""
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
