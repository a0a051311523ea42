"""The observer of job events that reports them to trackers."""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from coserve.errors import ConfigError
from coserve.serve.reporting.reporter import Figures, JobAbout, Reporter
from coserve.serve.settings import REPORTERS, ServerSettings
from coserve.serve.store.records import JobRecord
from coserve.serve.store.store import Store
from coserve.wire.messages import JobCheckpoint, JobEnded, JobNews, JobStarted, JobStep


class Reporting:
    """Reports every job to the trackers of `ServerSettings.report_to`, under the names of transformers'
    trainer.

    No method waits for a tracker or raises for it; a failure becomes an event of the job, of level "warn".
    Raises ConfigError where a tracker is not installed.
    """

    def __init__(self, settings: ServerSettings, store: Store) -> None:
        for name in settings.report_to:
            if find_spec(REPORTERS[name]) is None:
                raise ConfigError(f"report_to has {name!r}, which coserve[{name}] installs")
        self._project, self._store = settings.report_project, store
        self._folder = settings.state / "reports"
        self._jobs: dict[str, JobAbout] = {}
        self._noting: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reporters = [Reporter(name, self._failed) for name in settings.report_to]

    async def take(self, news: JobNews) -> None:
        """Passes an event on."""
        if not self._reporters:
            return
        self._loop = asyncio.get_running_loop()
        match news:
            case JobStep():
                await self._tell(news.job, news.step, _figures(news))
            case JobCheckpoint(validation_loss=loss):
                measured = {} if loss is None else {"loss": loss}
                figures = {f"eval/{name}": value for name, value in {**measured, **news.metrics}.items()}
                await self._tell(news.job, news.step, figures)
            case JobStarted():
                await self._about(news.job)
            case JobEnded():
                if (about := self._jobs.pop(news.job, None)) is not None:
                    for reporter in self._reporters:
                        reporter.take(Figures(about, news.step, None, news.status))

    async def close(self) -> None:
        """Lets trackers end."""
        await asyncio.gather(*(asyncio.to_thread(reporter.close) for reporter in self._reporters))
        if self._noting:
            await asyncio.wait(self._noting, timeout=1.0)

    async def _tell(self, job: str, step: int, numbers: Mapping[str, float]) -> None:
        about = await self._about(job)
        finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
        if about is not None and finite:
            for reporter in self._reporters:
                reporter.take(Figures(about, step, finite))

    async def _about(self, job: str) -> JobAbout | None:
        """The job's description; None for one that is over."""
        if job not in self._jobs:
            for record in await self._store.jobs.unfinished():
                if record.id == job:
                    self._jobs[job] = _about(record, self._project, self._folder)
        return self._jobs.get(job)

    def _failed(self, job: str, text: str) -> None:
        """Makes an event of a failure. Called on reporters' threads, and by `take`."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self._note, job, text)

    def _note(self, job: str, text: str) -> None:
        task = asyncio.ensure_future(self._store.jobs.note(job, text, "warn"))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)


def _figures(news: JobStep) -> dict[str, float]:
    return {
        "train/loss": news.loss,
        "train/learning_rate": news.learning_rate,
        "train/grad_norm": news.grad_norm,
        "train/tokens": news.tokens,
        "train/seconds": news.seconds,
        **{f"train/{name}": value for name, value in news.metrics.items()},
    }


def _about(job: JobRecord, project: str, folder: Path) -> JobAbout:
    settings = {
        "model": job.model,
        "adapter": job.name,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "peft": job.peft,
        **job.options,
    }
    return JobAbout(job.id, project, folder, settings)
