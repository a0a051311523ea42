import asyncio
import random
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from coserve.metrics import Metrics
from coserve.serve.answering.fair import FairQueue
from coserve.serve.store.records import Tenant
from coserve.serve.telemetry import Telemetry
from coserve.serve.training.watch import TRAINED_TOKEN, TrainingWatch
from coserve.wire.messages import JobEnded, JobStep

OWNER = Tenant("t", "T", weight=2.0)


@dataclass
class Row:
    id: str
    tenant: str
    status: str


class Rows:
    """As much of a store as is asked."""

    def __init__(self) -> None:
        self.jobs = self.tenants = self
        self.asked = 0

    async def unfinished(self) -> tuple[Row, ...]:
        self.asked += 1
        return (Row("job", "t", "running"), Row("other", "t", "queued"))

    async def get(self, tenant: str) -> Tenant | None:
        return OWNER if tenant == "t" else None


def watching(metrics: Metrics, queue: FairQueue, store: Any) -> TrainingWatch:
    link: Any = None  # no sample is made
    return TrainingWatch(metrics, queue, store, Telemetry(queue, link, lambda: False))


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_steps_are_counted_and_charged_to_whoever_owns_the_job() -> None:
    metrics, queue, rows = Metrics(), FairQueue(10, 10), Rows()
    store: Any = rows
    watch = watching(metrics, queue, store)

    async def story() -> None:
        for number in range(1, 4):
            await watch.take(JobStep("job", number, 0.5 / number, 10, 100, 1.0, 0.1, 2.0))
        await watch.count_jobs()

    asyncio.run(story())
    registry = metrics.registry
    assert value(registry, "coserve_finetune_steps_total") == 3
    assert value(registry, "coserve_finetune_tokens_total") == 300
    assert value(registry, "coserve_finetune_step_seconds_sum") == 6.0
    assert value(registry, "coserve_finetune_loss", job="job") == 0.5 / 3
    assert value(registry, "coserve_finetune_jobs", status="queued") == 1
    assert queue._lines["t"].counter == 300 * TRAINED_TOKEN / OWNER.weight
    assert rows.asked == 2  # once for the owner, once for the count
    asyncio.run(watch.take(JobEnded("job", "succeeded", 3)))
    assert value(registry, "coserve_finetune_loss", job="job") is None


def test_a_job_that_ends_before_its_first_step_is_no_trouble() -> None:
    store: Any = Rows()
    asyncio.run(watching(Metrics(), FairQueue(10, 10), store).take(JobEnded("job", "failed", 0)))
    asyncio.run(watching(Metrics(), FairQueue(10, 10), store).take(JobEnded("job", "paused", 7)))


def test_a_new_engine_ends_what_trained_in_the_one_before() -> None:
    """Whatever became of jobs in between, only what the new engine has is held against anybody."""
    metrics, queue, rows = Metrics(), FairQueue(10, 10), Rows()
    store: Any = rows
    watch, draws = watching(metrics, queue, store), random.Random(0)
    asyncio.run(watch.take(JobStep("job", 1, 0.5, 10, 100, 1.0, 0.1, 2.0)))
    assert set(watch._owners) == {"job"}, "of those who have said something, and nobody else"
    for _ in range(50):
        inside = tuple(name for name in ("job", "other") if draws.random() < 0.5)
        watch.connected(inside)
        heard = {name for name in inside if draws.random() < 0.7}
        for name in heard:
            asyncio.run(watch.take(JobStep(name, 1, 0.5, 10, 100, 1.0, 0.1, 2.0)))
        assert heard <= set(watch._owners) == queue._lines["t"].jobs <= set(inside)
        for name in ("job", "other"):
            told = value(metrics.registry, "coserve_finetune_loss", job=name)
            assert (told is not None) == (name in watch._owners)
