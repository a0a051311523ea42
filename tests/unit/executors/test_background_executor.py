"""Plans in the background: each begins behind the one before it, whatever the host does meanwhile."""

import threading
from collections.abc import Callable

import pytest

from coserve.core.plan import BasePlan, BaseResult, PassesAlone
from coserve.errors import TogetherFailed, WeightsUnreadable
from coserve.executors.executor import Command, ExecutorSpec, R
from coserve.executors.local import BackgroundExecutor
from waiting import wait_until


class Desk:
    """A worker that runs plans as it is let, and raises what is to go wrong."""

    def __init__(self) -> None:
        self.ran: list[tuple[float, PassesAlone]] = []
        self.let = threading.Semaphore(0)
        self.errors: dict[float, list[Exception]] = {}
        self.beat: Callable[[], object] = int
        self.called: list[tuple[int, int]] = []  # threads of commands, and how many plans had run
        self.ahead: set[float] = set()  # plans that are launched
        self.launched: list[float] = []

    @property
    def spec(self) -> ExecutorSpec:
        raise NotImplementedError

    def launch_ahead(self, plan: BasePlan) -> "OnDesk | None":
        if plan.predicted not in self.ahead:
            return None
        self.launched.append(plan.predicted)
        return OnDesk(self, plan)

    def run(self, plan: BasePlan) -> BaseResult:
        self.beat()
        assert self.let.acquire(timeout=20)
        self.ran.append((plan.predicted, plan.alone))
        if waiting := self.errors.get(plan.predicted):
            raise waiting.pop(0)
        return BaseResult(plan.predicted)

    def pause_training(self) -> None: ...

    def resume_training(self) -> None: ...

    def call(self, command: Command[R]) -> R:
        self.called.append((threading.get_ident(), len(self.ran)))
        return None  # type: ignore[return-value]

    def on_progress(self, beat: Callable[[], object]) -> None:
        self.beat = beat


class OnDesk:
    """A plan that the desk has."""

    def __init__(self, desk: Desk, plan: BasePlan) -> None:
        self.desk, self.plan = desk, plan

    def result(self) -> BaseResult:
        return self.desk.run(self.plan)


def test_a_launched_plan_waits_for_nobody() -> None:
    """The second is launched before anybody has waited for the first. The third needs what they find."""
    desk = Desk()
    desk.ahead = {1.0, 2.0}
    executor = BackgroundExecutor(desk)
    for number in (1.0, 2.0):
        executor.launch(BasePlan(predicted=number))
    wait_until(lambda: desk.launched == [1.0, 2.0])
    assert not desk.ran
    desk.let.release(9)
    executor.launch(BasePlan(predicted=3.0))
    found = [executor.collect() for _ in range(3)]
    assert [result and result.seconds for result in found] == [1.0, 2.0, 3.0]


def test_a_plan_begins_when_the_one_before_it_has_ended() -> None:
    """The host has collected neither, and has launched the second one meanwhile."""
    desk = Desk()
    executor = BackgroundExecutor(desk)
    executor.launch(BasePlan(predicted=1.0))
    executor.launch(BasePlan(predicted=2.0))
    assert executor.collect(wait=False) is None and not desk.ran
    desk.let.release(2)
    wait_until(lambda: len(desk.ran) == 2)
    found = [executor.collect(), executor.collect()]
    assert [result and result.seconds for result in found] == [1.0, 2.0] and executor.collect() is None


def test_what_failed_together_runs_again_before_what_follows() -> None:
    desk = Desk()
    desk.errors[1.0] = [TogetherFailed("no memory"), TogetherFailed("no memory")]
    desk.let.release(9)
    executor = BackgroundExecutor(desk)
    for number in (1.0, 2.0):
        executor.launch(BasePlan(predicted=number))
    found = executor.collect()
    assert found is not None and found.together_failed
    last = executor.collect()
    assert last is not None and not last.together_failed
    alone = [PassesAlone.NOBODY, PassesAlone.WINDOWS, PassesAlone.ALL]
    assert desk.ran == [*((1.0, one) for one in alone), (2.0, PassesAlone.NOBODY)]


def test_what_cannot_run_yet_runs_again_when_somebody_waits_for_it() -> None:
    desk = Desk()
    desk.errors[1.0] = [WeightsUnreadable("gone"), WeightsUnreadable("gone")]
    desk.let.release(9)
    executor = BackgroundExecutor(desk)
    for number in (1.0, 2.0):
        executor.launch(BasePlan(predicted=number))
    for tries in (1, 2):
        with pytest.raises(WeightsUnreadable):
            executor.collect()
        assert executor.collect(wait=False) is None and len(desk.ran) == tries
    results = [executor.collect(), executor.collect()]
    assert [result and result.seconds for result in results] == [1.0, 2.0]
    assert [number for number, _ in desk.ran] == [1.0, 1.0, 1.0, 2.0]


def test_commands_come_behind_all_plans_and_beats_from_whoever_waits() -> None:
    desk, beats = Desk(), list[int]()
    executor = BackgroundExecutor(desk)
    executor.on_progress(lambda: (beats.append(threading.get_ident()), desk.let.release(9)))
    executor.launch(BasePlan(predicted=1.0))
    executor.call(Command())
    assert {*beats} == {threading.get_ident()} and desk.called == [(threading.get_ident(), 1)]
    result = executor.collect()
    assert result is not None and result.seconds == 1.0
