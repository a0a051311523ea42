"""One act on a scripted engine: how long it lasts, and which part of it the figures are of."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.core.events import Event, TokenEvent
from coserve.core.job_status import JobStatus
from coserve.core.request import FinishReason
from coserve.demo.acts import ActRunner
from coserve.demo.load_generator import DemoRequest
from coserve.demo.view import QuietView
from coserve.schedule.stats import Stats


class Job:
    """A job with a given number of steps, one a second, each of `rows` training tokens."""

    def __init__(self, adapter: str, steps: int, rows: float = 100.0) -> None:
        self.adapter, self.steps, self.rows = adapter, steps, rows
        self.history: list[Any] = []
        self.status = JobStatus.RUNNING

    @property
    def is_under_way(self) -> bool:
        return self.status in (JobStatus.QUEUED, JobStatus.RUNNING)

    def step(self) -> float:
        """Makes a step; returns its training tokens."""
        if self.status != JobStatus.RUNNING:
            return 0.0
        self.history.append(SimpleNamespace(loss=1.0))
        if len(self.history) == self.steps:
            self.status = JobStatus.SUCCEEDED
        return self.rows


class Engine:
    """Steps of one second; each ends the oldest answer under way with its only token."""

    def __init__(self, *jobs: Job) -> None:
        self.now, self.jobs = 0.0, jobs
        self.scheduler = SimpleNamespace(stats=Stats(), has_work=True)
        self.handles: list[Any] = []
        self.scopes: list[str] = []
        self.cancelled = 0

    def clock(self) -> float:
        return self.now

    def generate(self, *asked: Any, scope: str) -> Any:
        request = SimpleNamespace(arrival=self.now, adapter=None)
        key = len(self.scopes)
        handle = SimpleNamespace(sequence=SimpleNamespace(key=key, request=request))
        handle.text, handle.finish_reason, handle.cancel = "", None, self._cancel
        self.scopes.append(scope)
        self.handles.append(handle)
        return handle

    def step(self) -> list[Event]:
        self.now += 1.0
        rows = sum(job.step() for job in self.jobs)
        self.scheduler.stats.kept_rows += rows
        self.scheduler.stats.backward_rows += rows
        if not self.handles:
            return []
        handle = self.handles.pop(0)
        handle.finish_reason = FinishReason.STOP
        return [TokenEvent(handle.sequence.key, "req", token=5, finish_reason=FinishReason.STOP)]

    def _cancel(self) -> None:
        self.cancelled += 1


class Seats:
    """A closed loop of some seats."""

    def __init__(self, seats: int) -> None:
        self._free = seats

    def due(self, now: float) -> Iterator[DemoRequest]:
        while self._free:
            self._free -= 1
            yield DemoRequest(0, "Hello", "Hello", None)  # type: ignore[arg-type]

    def answered(self, request: DemoRequest, text: str) -> None:
        self._free += 1


def runner(engine: Engine) -> ActRunner:
    return ActRunner(engine, QuietView(SimpleNamespace(is_terminal=True)))  # type: ignore[arg-type]


def test_figures_are_of_the_time_until_the_first_job_ended() -> None:
    """Beyond it one job alone trains, and the answers have more of the machine."""
    jobs = [Job("a", 4), Job("b", 10)]
    engine = Engine(*jobs)
    figures = runner(engine).play("act", Seats(3), 60.0, jobs=jobs)  # type: ignore[arg-type]
    assert engine.now == 10.0 and all(job.status == JobStatus.SUCCEEDED for job in jobs)
    assert (figures.seconds, figures.training_tokens_per_second) == (4.0, 200.0)
    assert (figures.answers, figures.unanswered) == (4, 2)
    assert figures.output_tokens_per_second == 1.0


def test_an_act_whose_jobs_go_on_is_measured_to_its_end() -> None:
    jobs = [Job("a", 400), Job("b", 400)]
    figures = runner(Engine(*jobs)).play("act", Seats(3), 5.0, jobs=jobs)  # type: ignore[arg-type]
    assert (figures.seconds, figures.training_tokens_per_second) == (5.0, 200.0)


def test_a_job_that_waits_for_memory_has_not_ended() -> None:
    jobs = [Job("a", 3), Job("b", 3)]
    jobs[1].status = JobStatus.QUEUED
    engine = Engine(*jobs)
    figures = runner(engine).play("act", Seats(1), 6.0, jobs=jobs)  # type: ignore[arg-type]
    assert engine.now == 6.0 and figures.seconds == 3.0


@pytest.mark.parametrize(
    ("answers", "longest", "seconds"), [(0, 0.0, 5.0), (20, 60.0, 20.0), (20, 12.0, 12.0)]
)
def test_an_act_waits_for_enough_answers_but_not_for_ever(
    answers: int, longest: float, seconds: float
) -> None:
    figures = runner(Engine()).play("act", Seats(2), 5.0, answers=answers, longest=longest)  # type: ignore[arg-type]
    assert (figures.seconds, figures.answers) == (seconds, seconds)


@pytest.mark.parametrize(("begun", "seconds"), [(True, 5.0), (False, 15.0)])
def test_an_act_waits_for_a_step_of_each_job_but_not_for_ever(begun: bool, seconds: float) -> None:
    """Bounds may leave a job no time at all."""
    jobs = [Job("a", 400), Job("b", 400)]
    engine = Engine(*jobs)
    if not begun:
        jobs[1].step = lambda: 0.0  # type: ignore[method-assign]
    figures = runner(engine).play("act", Seats(3), 5.0, jobs=jobs)  # type: ignore[arg-type]
    assert (engine.now, figures.seconds) == (seconds, seconds)


def test_an_act_ends_as_soon_as_a_late_job_has_made_its_step() -> None:
    jobs = [Job("a", 400), Job("b", 400)]
    engine, own = Engine(*jobs), jobs[1].step
    jobs[1].step = lambda: own() if engine.now >= 9.0 else 0.0  # type: ignore[method-assign]
    assert runner(engine).play("act", Seats(3), 5.0, jobs=jobs).seconds == 9.0  # type: ignore[arg-type]


def test_acts_share_no_prefixes_and_leave_nothing_under_way() -> None:
    engine = Engine()
    stage = runner(engine)
    for _ in range(2):
        stage.play("act", Seats(3), 2.0)  # type: ignore[arg-type]
        engine.handles.clear()
    assert set(engine.scopes) == {"act-1", "act-2"}
    assert engine.cancelled == 4
