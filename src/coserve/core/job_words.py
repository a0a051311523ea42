"""Sentences about a fine-tuning job: one for each state and the reason for it."""

from dataclasses import dataclass
from typing import Final, Literal

from coserve.core.job_status import JobStatus

Rival = Literal["requests", "jobs"]  # had the time in which a running job got none

STARVED: Final = {
    "requests": "waits for room beside requests, whose bounds have left no time to train",
    "jobs": "waits for its turn after steps of other jobs",
}
REMEDY: Final = {
    "requests": "; the operator can let it have some at their expense (scheduler.starvation), loosen bounds "
    "(slo of the requests' tier, --slowdown), or have requests ask for the tier flex",
    "jobs": "; each gets its tenant's share in the long run",
}
TRAINS_AGAIN: Final = "Fine-tuning job trains again"


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Facts about a job that decide why it waits."""

    status: JobStatus
    is_ready: bool  # there is an engine that answers
    is_draining: bool  # the server is stopping
    is_inside: bool  # the engine has the job, or is stopping its earlier run
    is_on_trial: bool  # it waits to be tried alone
    is_full: bool  # as many jobs train as may
    most: int  # jobs that may train
    reason: str | None  # the engine's own, of a job that is inside and has no room
    starved_by: Rival | None


def waiting_for(place: JobPlace) -> str | None:
    """The reason why a queued job has not begun, or a running one does not train; None for one that does, and
    for paused and ended ones. The first reason that holds is told."""
    if place.status not in (JobStatus.QUEUED, JobStatus.RUNNING):
        return None
    is_queued = place.status == JobStatus.QUEUED
    if place.is_draining and is_queued:
        return "waits for the server's next start, as this one is stopping"
    if not place.is_ready:
        return "waits for the engine, which is starting"
    if place.is_on_trial:
        return "waits to be tried alone, as an engine ended while it trained"
    if is_queued:
        if place.is_inside:
            return place.reason or "waits until its earlier run has stopped"
        return (
            f"waits until one of {place.most} jobs that train ends" if place.is_full else "begins in a moment"
        )
    return None if place.starved_by is None else STARVED[place.starved_by] + REMEDY[place.starved_by]


def stopped(status: JobStatus, step: int, why: str) -> str | None:
    """The event of a job that has left its engine resumable, with the status that was asked for.

    None where a pause, which has an event of its own, came before the first step. `why` is said of a job that
    nobody paused.
    """
    if status == JobStatus.PAUSED:
        return (
            f"Fine-tuning job saved at step {step}, where it continues once it is resumed" if step else None
        )
    if status == JobStatus.QUEUED:
        return f"Fine-tuning job saved at step {step}, where it continues" if step else None
    return f"Fine-tuning job stopped {why}, {f'saved at step {step}' if step else 'before its first step'}"
