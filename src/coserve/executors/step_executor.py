"""The executors of several bases on one device, which run their parts of a step in turn."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coserve.core.plan import BaseResult, StepPlan, StepResult
from coserve.core.request import BASE
from coserve.errors import WeightsUnreadable
from coserve.executors.executor import Executor


@dataclass(slots=True)
class _UnderWay:
    """A plan without a result: the bases whose executors have their parts, and the results that are there."""

    plan: StepPlan
    sent: set[str] = field(default_factory=set)
    done: dict[str, BaseResult] = field(default_factory=dict)


class StepExecutor:
    """Runs plans of steps: the part of each base on that base's executor, which never sees another's.

    Bases compute one after the other, also those in processes of their own, which would take each other's
    cores: a part is launched when the one before it has its result. The parts of one base alone are launched
    at once, so that several plans may be under way. Where an executor cannot run its part yet
    (WeightsUnreadable) the others are launched, so that commands come behind them, and those that have run
    keep their results until the plan is tried again.
    Commands go to a base's own executor, when `collect` has returned or raised.
    """

    def __init__(self, first: Executor) -> None:
        """`first` is the executor of the first base."""
        self._executors: dict[str, Executor] = {BASE: first}
        self._under_way: deque[_UnderWay] = deque()

    def add(self, base: str, executor: Executor) -> None:
        """Adds the executor of one more base; no plan may be under way."""
        assert not self._under_way, "plans are for the bases that are there"
        self._executors[base] = executor

    def launch(self, plan: StepPlan) -> None:
        """Takes a plan and returns at once; several may be under way, and run in this order."""
        self._under_way.append(_UnderWay(plan))
        if len(self._executors) == 1:
            self._send(self._under_way[-1], BASE)

    def collect(self, wait: bool = True) -> StepResult | None:
        """The result of the oldest plan without one collected. None if no plan was launched or, without
        `wait`, if it is not done. Raises the errors of `Executor.collect`; the plan stays the oldest."""
        if not self._under_way:
            return None
        oldest = self._under_way[0]
        for base in oldest.plan.bases:
            if not self._collect(oldest, base, wait):
                return None
        self._under_way.popleft()
        return StepResult(oldest.done)

    def run(self, plan: StepPlan) -> StepResult:
        """Launches one plan and waits for its result; no other may be under way."""
        self.launch(plan)
        result = self.collect()
        assert result is not None, "a plan that was launched has a result"
        return result

    def _collect(self, step: _UnderWay, base: str, wait: bool) -> bool:
        """Runs a base's part of a plan, unless it has run; returns whether its result is there."""
        if base in step.done:
            return True
        self._send(step, base)
        try:
            result = self._executors[base].collect(wait)
        except WeightsUnreadable:
            for other in step.plan.bases:
                self._send(step, other)
            raise
        if result is not None:
            step.done[base] = result
        return result is not None

    def _send(self, step: _UnderWay, base: str) -> None:
        """Launches a base's part of a plan, once."""
        if base not in step.sent:
            step.sent.add(base)
            self._executors[base].launch(step.plan.bases[base])

    def pause_training(self) -> None:
        """See `Executor`. A layer of each base's training runs in any case."""
        for executor in self._executors.values():
            executor.pause_training()

    def resume_training(self) -> None:
        """See `Executor`."""
        for executor in self._executors.values():
            executor.resume_training()

    def on_progress(self, beat: Callable[[], object]) -> None:
        """See `Executor`."""
        for executor in self._executors.values():
            executor.on_progress(beat)
