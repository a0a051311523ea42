"""The interface to a tracker, and the thread on which it is called.

A tracker is a module of this folder with `open_run(about) -> TrackerRun`. The thread imports it when the
first job is reported. So nothing that it does, such as importing, using the network or hanging, delays a job
or an answer.
"""

import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, cast

from coserve.core.contained import contained
from coserve.core.job_status import JobStatus

_MOST_WAITING: Final = 1000  # most figures that wait for a slow tracker; further ones are dropped
_ENDS_WITHIN: Final = 2.0  # seconds that a tracker gets when the server stops


@dataclass(frozen=True, slots=True)
class JobAbout:
    """A job as trackers describe it: its run's name is the job's id, its `settings` are plain values. A
    tracker that writes files has `folder`, which outlives the server."""

    job: str
    project: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


class TrackerRun(Protocol):
    """A job at one tracker. Any method may raise, or never return."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Adds figures of an optimizer step; those of validation come after later steps'."""
        ...

    def end(self, status: JobStatus) -> None:
        """Closes the run of a job that is over or paused."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers by name at an optimizer step; None ends the job's run, with its `status`."""

    about: JobAbout
    step: int
    numbers: Mapping[str, float] | None
    status: JobStatus = JobStatus.RUNNING


class Reporter:
    """One tracker and its thread. A job for which it fails is reported to it no more; `on_failure(job, text)`
    is called once for each such job, on any thread."""

    def __init__(self, name: str, on_failure: Callable[[str, str], None]) -> None:
        self.name = name
        self._on_failure = on_failure
        self._waiting: queue.Queue[Figures | None] = queue.Queue(_MOST_WAITING)
        self._runs: dict[str, TrackerRun] = {}
        self._failed: set[str] = set()
        self._late: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"report-{name}", daemon=True)
        self._thread.start()

    def take(self, figures: Figures) -> None:
        """Hands figures to the thread, without waiting for it."""
        job = figures.about.job
        try:
            self._waiting.put_nowait(figures)
        except queue.Full:
            if job not in self._late:
                self._late.add(job)
                self._on_failure(job, f"{self.name} is too slow: it is not told of all steps")
        if figures.numbers is None:
            self._late.discard(job)

    def close(self) -> None:
        """Gives the tracker a moment to end; it is left behind if it does not."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_ENDS_WITHIN)

    def _work(self) -> None:
        while (figures := self._waiting.get()) is not None:
            job = figures.about.job
            if job not in self._failed:
                try:
                    self._report(figures)
                except BaseException as error:  # also SystemExit of a library
                    self._fail(job, error)
            if figures.numbers is None:  # the job is over, and its name is not used again
                self._failed.discard(job)
        for job in list(self._runs):
            try:
                self._runs.pop(job).end(JobStatus.PAUSED)
            except BaseException as error:
                self._fail(job, error)

    def _report(self, figures: Figures) -> None:
        job = figures.about.job
        if figures.numbers is None:
            if (run := self._runs.pop(job, None)) is not None:
                run.end(figures.status)
            return
        if job not in self._runs:
            module = importlib.import_module(f"coserve.serve.reporting.{self.name}")
            self._runs[job] = cast(TrackerRun, module.open_run(figures.about))
        self._runs[job].log(figures.numbers, figures.step)

    def _fail(self, job: str, error: BaseException) -> None:
        self._runs.pop(job, None)
        self._failed.add(job)
        if isinstance(error, Exception):
            error = contained(error, f"reporting to {self.name}")
        self._on_failure(job, f"Not reported to {self.name} any more: {error}")
