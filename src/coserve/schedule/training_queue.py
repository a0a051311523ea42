"""The queue of training jobs: their order and progress."""

from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from coserve.core.job_words import Rival
from coserve.core.plan import MicroBatchOutput, OptimStep, StepPlan, TrainingSegment
from coserve.core.request import BASE
from coserve.core.sequence import MicroBatch, Position

STARVED: Final = 10.0  # seconds without any training after which a job counts as starved
_FEWEST: Final = 3  # least plans without a piece of a starved job: one step may take longer than `STARVED`


@dataclass(slots=True)
class TrainingWait:
    """The wait of a job for its next piece of training, and whether the job is starved."""

    served_at: float | None = None  # when it last got a piece, or began to wait for one
    passed: int = 0  # plans since then
    beside_requests: bool = False  # one of them had requests
    starved_since: float | None = None
    starved_by: Rival = "requests"
    resumed_at: float | None = None  # when a starved job got the first of its newest pieces

    def renew(self) -> None:
        """Notes that the job has new work, and waits from its next turn on."""
        self.served_at, self.passed, self.beside_requests = None, 0, False

    def note_plan(self, has_requests: bool) -> None:
        """Counts a plan."""
        self.passed += 1
        self.beside_requests = self.beside_requests or has_requests

    def note_turn(self, now: float) -> None:
        """Notes that the job has work and a step is planned. It is starved once it has got nothing for
        `STARVED` seconds, and until it has got pieces for as long without such a break."""
        self.served_at = now if self.served_at is None else self.served_at
        if self.passed >= _FEWEST and now - self.served_at > STARVED:
            self.starved_since = self.served_at if self.starved_since is None else self.starved_since
            self.starved_by = "requests" if self.beside_requests else "jobs"
            self.resumed_at = None
        elif self.resumed_at is not None and now - self.resumed_at > STARVED:
            self.starved_since = self.resumed_at = None

    def note_served(self, now: float, is_beside_requests: bool) -> None:
        """Notes a piece of training in a step planned at `now`. Without requests beside it, those that
        starved the job are over."""
        self.served_at, self.passed, self.beside_requests = now, 0, False
        if self.starved_by == "requests" and not is_beside_requests:
            self.starved_since = self.resumed_at = None
        if self.starved_since is not None and self.resumed_at is None:
            self.resumed_at = now


@dataclass(slots=True)
class QueueEntry:
    """One job's current work: micro-batches, an optimizer step, or both. `progress` is rows trained per
    weight, its virtual time."""

    name: str
    weight: float
    update: OptimStep | None  # the optimizer step at its end; None: the work ends with the last micro-batch
    micro_batches: deque[MicroBatch] = field(default_factory=deque)  # those not known to be done
    outputs: dict[int, MicroBatchOutput] = field(default_factory=dict)  # by the micro-batch's key
    is_open: bool = False  # the work has not ended yet
    is_stepping: bool = False  # a plan under way has the optimizer step
    progress: float = 0.0
    steps: int = 0  # optimizer steps since it was added
    wait: TrainingWait = field(default_factory=TrainingWait)
    base: str = BASE

    @property
    def is_due(self) -> bool:
        """Tells whether all micro-batches are done or under way to their end, and the optimizer step is not
        planned."""
        is_open = self.update is not None and self.is_open and not self.is_stepping
        return is_open and all(batch.done for batch in self.micro_batches)

    @property
    def is_waiting(self) -> bool:
        """Tells whether the job has work to plan."""
        return self.is_due or not all(batch.done for batch in self.micro_batches)

    def ready(self, in_flight: int) -> list[MicroBatch]:
        """The job's micro-batches that may run now, in order: at most so many."""
        return list(islice((batch for batch in self.micro_batches if not batch.done), in_flight))


class TrainingQueue:
    """All jobs, ordered by weighted fair queueing: least virtual time first."""

    def __init__(self, in_flight: int) -> None:
        self.released: list[tuple[str, int]] = []  # bases and keys whose device state the next plan drops
        self._jobs: dict[str, QueueEntry] = {}
        self.in_flight = in_flight  # micro-batches of a job that may run at once
        self._clock = 0.0  # virtual time of the job furthest behind when turns were last given

    def __contains__(self, update: OptimStep) -> bool:
        """Tells whether an optimizer step is that of a job's current work, not of an earlier job by its
        name."""
        job = self._jobs.get(update.job)
        return job is not None and job.update is update

    @property
    def has_work(self) -> bool:
        """Tells whether any job has work to plan or under way."""
        return any(job.is_open for job in self._jobs.values())

    def add(
        self,
        name: str,
        micro_batches: Iterable[MicroBatch],
        weight: float = 1.0,
        update: OptimStep | None = None,
        is_pass: bool = False,
        base: str = BASE,
    ) -> None:
        """Gives a job the micro-batches of its next optimizer step, which `update` ends. They pass in order,
        through the base of this id. Those of a pass have no optimizer step at their end; one without
        micro-batches may follow.

        Jobs get rows in proportion to their weights. A job that was idle starts at the virtual time of the
        others instead of catching up.
        """
        update = None if is_pass else update or OptimStep(name)
        job = self._jobs.setdefault(name, QueueEntry(name, weight, update))
        assert not job.is_open, f"job {name} has not finished its last step"
        job.weight, job.base = weight, base
        job.update, job.is_open, job.outputs = update, True, {}
        for batch in micro_batches:
            batch.base = base
            job.micro_batches.append(batch)
        assert job.micro_batches or update is not None, f"a pass of job {name} needs a micro-batch"
        assert all(b.job == name and b.length > 0 for b in job.micro_batches), "rows of this job"
        job.progress = max(job.progress, self._clock)
        job.wait.renew()

    def set_weight(self, name: str, weight: float) -> None:
        """Changes a job's weight; its virtual time so far stays. A job without work so far (its answers are
        still sampled) gets its weight with its first work."""
        if (job := self._jobs.get(name)) is not None:
            job.weight = weight

    def remove(self, name: str) -> None:
        """Removes a job; the next plan releases its micro-batches."""
        job = self._jobs.pop(name, None)
        if job is not None:
            self.released.extend((job.base, batch.key) for batch in job.micro_batches)

    def turns(self, now: float, starvation: float | None) -> tuple[list[QueueEntry], bool]:
        """Jobs with work to plan in their order, and whether the first is starving."""
        jobs = [job for job in self._jobs.values() if job.is_waiting]
        if not jobs:
            return [], False
        for job in jobs:
            job.wait.note_turn(now)
        jobs.sort(key=lambda job: job.progress)
        self._clock = jobs[0].progress
        if starvation is None:
            return jobs, False
        waited = {job.name: now - (job.wait.served_at or 0.0) for job in jobs}
        starving = [job for job in jobs if waited[job.name] > starvation]
        starving.sort(key=lambda job: -waited[job.name])
        return [*starving, *(job for job in jobs if job not in starving)], bool(starving)

    def find(self, segment: TrainingSegment) -> MicroBatch | None:
        """The micro-batch of a window; None where its job has ended or restarted."""
        job = self._jobs.get(segment.job)
        batches = () if job is None else job.micro_batches
        return next((batch for batch in batches if batch.key == segment.key), None)

    def level(self, first: QueueEntry, jobs: Iterable[QueueEntry]) -> list[MicroBatch]:
        """Micro-batches that may run in a group with those of the first job.

        They belong to jobs that are ahead of it by no more than it gets itself in that time, so that weights
        hold in the long run. Those that have begun may run, too, so that small and large ones that went
        forward together come back together.
        """
        reach = first.progress + first.ready(self.in_flight)[0].length / first.weight
        return [
            batch
            for job in jobs
            for batch in job.ready(self.in_flight)
            if batch.has_begun or job.progress <= reach
        ]

    def planned(self, plan: StepPlan, now: float) -> None:
        """Counts the training of a plan launched at `now` as done."""
        self._advance(plan.training)
        for update in plan.updates:
            self._jobs[update.job].is_stepping = True
        has_requests = bool(plan.inference) or plan.first.idle > 0
        trained = plan.jobs
        for name, job in self._jobs.items():
            job.wait.note_plan(has_requests)
            if name in trained:
                job.wait.note_served(now, has_requests)

    def paused(
        self, positions: Mapping[int, Position], ran: Iterable[TrainingSegment], unbegun: Container[int]
    ) -> None:
        """Rewinds training that plans under way will not run: micro-batches return to their `positions` (by
        key), advanced by the segments that `ran`. Those in `unbegun` were first named in a plan that trains
        nothing, and are named again."""
        for job in self._jobs.values():
            job.is_stepping = False
            for batch in job.micro_batches:
                if batch.key in positions:
                    batch.rewind(positions[batch.key])
                    batch.under_way = 0
                batch.told = batch.told and batch.key not in unbegun
        self._advance(ran)

    def _advance(self, segments: Iterable[TrainingSegment]) -> None:
        for segment in segments:
            if (batch := self.find(segment)) is not None:
                batch.advance(segment.start, segment.length, segment.span)
                batch.under_way += 1

    def ran(
        self, batch: MicroBatch, rows: float, output: MicroBatchOutput | None = None
    ) -> Mapping[int, MicroBatchOutput] | None:
        """Adds `rows` rows through the whole depth to the progress of a micro-batch's job, and its `output`
        if these were its last. Returns the outputs of a pass that ends with it."""
        job = self._jobs[batch.job]
        job.progress += rows / job.weight
        batch.under_way -= 1
        if batch.done and not batch.under_way:
            job.micro_batches.remove(batch)
            self.released.append((job.base, batch.key))
        if output is not None:
            job.outputs[batch.key] = output
        if job.update is not None or job.micro_batches:
            return None
        job.is_open = False
        return job.outputs

    def updated(self, name: str) -> None:
        """Notes that a job's optimizer has stepped."""
        job = self._jobs[name]
        job.is_open = job.is_stepping = False
        job.steps += 1


def starved(queue: TrainingQueue, name: str) -> tuple[float, Rival] | None:
    """Time of the last piece of a starved job (`STARVED`), and what had the steps since; None for others."""
    job = queue._jobs.get(name)
    if job is None or job.wait.starved_since is None:
        return None
    return job.wait.starved_since, job.wait.starved_by


def rows_through(batch: MicroBatch, rows: int, layers: int) -> float:
    """Rows through part of the depth, as equivalent rows through all of it; the tail counts as one layer.

    Padding is not counted: each window is charged its share of the real rows.
    """
    return rows * layers / batch.layers * (1 - sum(batch.padding) / batch.length)
