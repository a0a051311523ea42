"""Drives the demo's acts: one loop that submits requests, steps the engine and updates the view."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from transformers.utils import logging

from coserve.config import EngineConfig
from coserve.core.events import Event
from coserve.core.request import SLO
from coserve.demo.figures import Phase, RateMeter, phase
from coserve.demo.load_generator import LoadGenerator, RequestSource
from coserve.demo.view import DemoView, JobProgress, Snapshot
from coserve.engine.engine import Engine
from coserve.engine.finetuning import FineTuning
from coserve.kernels.cpu import choose_dtype

NEWEST: Final = 1500  # times between tokens that the figures on screen look back on
_LONGEST: Final = 3.0  # times an act's seconds, after which it ends although a job has made no step


class ActRunner:
    """Drives an engine act by act and shows it. Ctrl-C ends the act under way, and then the story."""

    def __init__(self, engine: Engine, view: DemoView) -> None:
        self.engine, self._view = engine, view
        self._stopped = False
        self._acts = 0  # played so far

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Has the first Ctrl-C take effect between two steps; a second one interrupts at once."""
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def step(self) -> list[Event]:
        """One step of the engine; raises KeyboardInterrupt once Ctrl-C was pressed."""
        self.go_on()
        return self.engine.step()

    def go_on(self) -> None:
        """Raises KeyboardInterrupt once Ctrl-C was pressed."""
        if self._stopped:
            raise KeyboardInterrupt

    def play(
        self,
        act: str,
        source: RequestSource,
        seconds: float,
        slo: SLO = SLO(),
        jobs: Sequence[FineTuning] = (),
        answers: int = 0,
        longest: float = 0.0,
    ) -> Phase:
        """Runs an act for `seconds`, or until all of `jobs` have ended, and gives its figures.

        With `answers` the act goes on until that many are complete, but not beyond `longest` seconds. It
        lasts until each job has made a step, at most three times as long: tight bounds may leave training no
        time. The figures
        are of the time until the first job ended: all of them trained until then. `slo` is the bounds that
        each request states. Ctrl-C ends the act, not the figures.
        """
        engine, self._acts = self.engine, self._acts + 1
        clients = LoadGenerator(engine, source, slo, scope=f"act-{self._acts}")
        started = engine.clock()
        meter = RateMeter(engine.scheduler.stats, started)
        now, shown = started, started
        figures: Phase | None = None
        while not self._stopped and not _all_ended(jobs):
            enough = clients.latencies.answers >= answers or now >= started + longest
            is_time = now >= started + seconds and enough
            if is_time and (_all_begun(jobs) or now >= started + _LONGEST * seconds):
                break
            clients.submit()
            if engine.scheduler.has_work:
                clients.take(engine.step())
            else:
                time.sleep(0.001)  # until the next request of a trace arrives
            now = engine.clock()
            if figures is None and _any_ended(jobs):
                figures = self._figures(clients, meter, now)
            if now >= shown + self._view.period:
                shown = now
                left = min(seconds - now + started, time_left(jobs, now - started))
                if answers > clients.latencies.answers:
                    left = max(left, min(longest - now + started, clients.time_to(answers, now - started)))
                self._view.show(self._snapshot(act, clients, meter, now, left, jobs))
        if figures is None:
            figures = self._figures(clients, meter, now)
        clients.cancel_all()
        return figures

    def _figures(self, clients: LoadGenerator, meter: RateMeter, now: float) -> Phase:
        total = meter.total(self.engine.scheduler.stats, now)
        return phase(clients.latencies, total, now - meter.started, now)

    def _snapshot(
        self,
        act: str,
        clients: LoadGenerator,
        meter: RateMeter,
        now: float,
        left: float,
        jobs: Sequence[FineTuning],
    ) -> Snapshot:
        return Snapshot(
            act=act,
            elapsed=now - meter.started,
            left=left,
            rates=meter.now(self.engine.scheduler.stats, now),
            gap_p50=clients.latencies.gap(0.5, NEWEST),
            gap_p99=clients.latencies.gap(0.99, NEWEST),
            bound=clients.latencies.slo.between_tokens,
            jobs=tuple(
                JobProgress(j.adapter, len(j.history), j.steps, [u.loss for u in j.history]) for j in jobs
            ),
            under_way=clients.under_way(),
            completed=clients.completed(),
        )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def time_left(jobs: Sequence[FineTuning], elapsed: float) -> float:
    """Seconds until the slowest job is done at its pace so far; infinite while unknown."""
    running = [job for job in jobs if job.status == "running"]
    if not running or not all(job.history for job in running):
        return float("inf")
    return max((job.steps - len(job.history)) * elapsed / len(job.history) for job in running)


def open_engine(model: str | Path, device: str) -> tuple[Engine, str]:
    """An engine in the precision that suits the device, and a sentence that says which and why."""
    logging.disable_progress_bar()  # a loading bar would stand in the middle of the view
    dtype, why = ("bfloat16", "in bfloat16") if device != "cpu" else choose_dtype()
    return Engine(model, EngineConfig(dtype=dtype, device=device)), why


def _all_begun(jobs: Sequence[FineTuning]) -> bool:
    return all(job.history or job.status != "running" for job in jobs)


def _any_ended(jobs: Sequence[FineTuning]) -> bool:
    return any(not job.is_under_way for job in jobs)


def _all_ended(jobs: Sequence[FineTuning]) -> bool:
    return bool(jobs) and not any(job.is_under_way for job in jobs)
