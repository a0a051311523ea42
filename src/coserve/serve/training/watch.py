"""Reports training to the metrics and the fair queue: trained tokens count as generated ones."""

from collections.abc import Collection

from coserve.core.job_status import UNFINISHED
from coserve.metrics import Metrics
from coserve.serve.answering.fair import FairQueue
from coserve.serve.store.records import Tenant
from coserve.serve.store.store import Store
from coserve.serve.telemetry import Telemetry
from coserve.wire.messages import JobEnded, JobNews, JobStarted, JobStep

TRAINED_TOKEN = 3.0  # a pass forward costs what a prompt token costs, and the way back twice that


class TrainingWatch:
    """Receives every job event once."""

    def __init__(self, metrics: Metrics, queue: FairQueue, store: Store, telemetry: Telemetry) -> None:
        self._metrics, self._queue, self._store, self._telemetry = metrics, queue, store, telemetry
        self._owners: dict[str, Tenant] = {}

    async def take(self, news: JobNews) -> None:
        """Counts an event's tokens and statuses."""
        match news:
            case JobStarted():
                if (owner := await self._owner(news.job)) is not None:
                    self._queue.note_job(owner, news.job, trains=True)
            case JobStep():
                self._count(news)
                if (owner := await self._owner(news.job)) is not None:
                    self._queue.note_job(owner, news.job, trains=True)
                    self._queue.charge(owner, TRAINED_TOKEN * news.tokens)
                    self._telemetry.trained(owner.id, news)
            case JobEnded():
                if (owner := self._owners.pop(news.job, None)) is not None:
                    self._queue.note_job(owner, news.job, trains=False)
                self._metrics.finetune_loss.remove(news.job)

    def connected(self, jobs: Collection[str]) -> None:
        """Drops jobs of earlier engines that are not in `jobs`: those cancelled, paused or quarantined in
        between have no further events."""
        for job in self._owners.keys() - set(jobs):
            self._queue.note_job(self._owners.pop(job), job, trains=False)
            self._metrics.finetune_loss.remove(job)

    async def count_jobs(self) -> None:
        """Sets the metric of unfinished jobs by status."""
        counts = dict.fromkeys(UNFINISHED, 0)
        for job in await self._store.jobs.unfinished():
            counts[job.status] = counts.get(job.status, 0) + 1
        for status, count in counts.items():
            self._metrics.finetune_jobs.labels(status).set(count)

    def _count(self, step: JobStep) -> None:
        self._metrics.finetune_steps.inc()
        self._metrics.finetune_tokens.inc(step.tokens)
        self._metrics.finetune_loss.labels(step.job).set(step.loss)
        self._metrics.finetune_step_seconds.observe(step.seconds)

    async def _owner(self, job: str) -> Tenant | None:
        if job not in self._owners:
            for known in await self._store.jobs.unfinished():
                if known.id == job and (tenant := await self._store.tenants.get(known.tenant)) is not None:
                    self._owners[job] = tenant
        return self._owners.get(job)
