"""Which job trains next, and how much of the machine each running one gets: fair among tenants."""

from collections import Counter
from collections.abc import Mapping, Sequence

from coserve.serve.store.records import Job


def next_job(jobs: Sequence[Job], weights: Mapping[str, float]) -> Job | None:
    """Of the queued jobs the oldest one of the tenant that has the least running for its weight.

    `jobs` are all that are not over, the oldest first; `weights` are by tenant.
    """
    running = Counter(job.tenant for job in jobs if job.status == "running")
    queued = [job for job in jobs if job.status == "queued"]
    return min(queued, key=lambda job: running[job.tenant] / weights[job.tenant], default=None)


def job_weights(jobs: Sequence[Job], weights: Mapping[str, float]) -> dict[str, float]:
    """The share of each running job: its tenant's, divided among that tenant's running jobs."""
    running = [job for job in jobs if job.status == "running"]
    counts = Counter(job.tenant for job in running)
    return {job.id: weights[job.tenant] / counts[job.tenant] for job in running}
