"""Fair shares among tenants: the job that trains next, and each running job's share of the machine."""

from collections import Counter
from collections.abc import Mapping, Sequence

from coserve.core.job_status import JobStatus
from coserve.serve.store.records import JobRecord


def next_job(jobs: Sequence[JobRecord], weights: Mapping[str, float]) -> JobRecord | None:
    """The next job: the oldest queued one of the tenant with the fewest running jobs relative to its weight.

    `jobs` are all unfinished ones, the oldest first; `weights` are by tenant.
    """
    running = Counter(job.tenant for job in jobs if job.status == JobStatus.RUNNING)
    queued = [job for job in jobs if job.status == JobStatus.QUEUED]
    return min(queued, key=lambda job: running[job.tenant] / weights[job.tenant], default=None)


def next_to_wait(jobs: Sequence[JobRecord], weights: Mapping[str, float]) -> JobRecord | None:
    """The running job to be preempted for a queued one of another tenant, where all places are taken.

    It is the newest one of the tenant with the most running jobs relative to its weight, if that tenant then
    still has no less than the other (which excludes swapping back and forth), or at least one job where the
    other has none.
    """
    chosen = next_job(jobs, weights)
    running = [job for job in jobs if job.status == JobStatus.RUNNING]
    if chosen is None or not running:
        return None
    counts = Counter(job.tenant for job in running)
    # The newest of several equal ones: `max` takes the first that it meets.
    last = max(reversed(running), key=lambda job: counts[job.tenant] / weights[job.tenant])
    left, gained = counts[last.tenant] - 1, counts[chosen.tenant] + 1
    is_even = left / weights[last.tenant] >= gained / weights[chosen.tenant]
    return last if is_even or left >= gained == 1 else None


def job_weights(jobs: Sequence[JobRecord], weights: Mapping[str, float]) -> dict[str, float]:
    """The share of each running job: its tenant's, divided among that tenant's running jobs."""
    running = [job for job in jobs if job.status == JobStatus.RUNNING]
    counts = Counter(job.tenant for job in running)
    return {job.id: weights[job.tenant] / counts[job.tenant] for job in running}
