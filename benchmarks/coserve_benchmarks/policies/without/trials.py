"""Short measured trials of a contestant's settings on the beginning of its workload, and the choice."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from coserve.simulate.intervals import percentile
from coserve.simulate.replay import LoadResult
from coserve.workload.requests import Workload

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial: share of requests within their own bounds, seconds to the last token at the 50th and
    99th percentile (0 without requests), output tokens/s and fine-tuning tokens/s."""

    attainment: float
    p50: float
    p99: float
    output: float
    training: float


def measure(load: LoadResult) -> TrialResult:
    """Figures of a load by which settings are compared."""
    latencies = [answer.latency for answer in load.answers] or [0.0]
    kept = [answer.keeps(answer.slo) for answer in load.answers]
    return TrialResult(
        attainment=sum(kept) / len(kept) if kept else 1.0,
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
        output=load.output_rate(),
        training=load.training_rate(),
    )


def try_all(settings: Iterable[C], run: Callable[[C], LoadResult]) -> dict[C, TrialResult]:
    """Runs each setting once."""
    return {setting: measure(run(setting)) for setting in settings}


def best(tried: Mapping[C, TrialResult]) -> C:
    """The setting that trains most among those with the best attainment; the quicker one if none trains."""
    return max(tried, key=lambda setting: _merit(tried[setting]))


def frontier(tried: Mapping[C, TrialResult]) -> dict[C, TrialResult]:
    """The settings of which no other is better both in the 99th percentile of latency and in training."""
    return {
        setting: found
        for setting, found in tried.items()
        if not any(one.p99 < found.p99 and one.training > found.training for one in tried.values())
    }


def beginning(workload: Workload, seconds: float) -> Workload:
    """A workload of at most `seconds` from the first job on; requests that came before it are left out."""
    seconds = min(seconds, workload.seconds)
    first = min((job.at for job in workload.jobs), default=0.0)
    begin = min(first, workload.seconds - seconds)
    end = begin + seconds
    return replace(
        workload,
        seconds=seconds,
        requests=tuple(replace(r, at=r.at - begin) for r in workload.requests if begin <= r.at < end),
        jobs=tuple(replace(job, at=max(0.0, job.at - begin)) for job in workload.jobs if job.at < end),
    )


def _merit(tried: TrialResult) -> tuple[float, float, float]:
    return tried.attainment, tried.training, -tried.p50
