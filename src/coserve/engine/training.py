"""All fine-tuning jobs of one engine, from admission to their end."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from coserve.adapters.bank import check_name
from coserve.adapters.paging.stored import KnownVersion
from coserve.adapters.settings import left_untrained
from coserve.core.contained import contained
from coserve.core.events import JobFailed, PassDone, StepDone
from coserve.core.job_status import JobStatus
from coserve.engine.finetuning import FineTuning, Keeping, StateSnapshot
from coserve.engine.rollouts import Rollouts
from coserve.engine.sessions import Sessions
from coserve.engine.training_host import TrainingHost
from coserve.errors import ConfigError, CoserveError, JobError, OutOfMemory
from coserve.executors.executor import MarkState, OpenSession, ReadState, RestartStep
from coserve.model.base import Base
from coserve.train.distilled import DistilledSteps
from coserve.train.example import check_room
from coserve.train.job import PreparedJob
from coserve.train.needs import JobNeeds
from coserve.train.objectives import KTO, Distillation, Objective, Reinforcement, Supervised
from coserve.train.preferences import LabelledSteps, PreferenceSteps
from coserve.train.reinforced import ReinforcedSteps
from coserve.train.save_policy import SavePolicy
from coserve.train.state import TrainingState
from coserve.train.steps import JobSteps, StepWork
from coserve.train.supervised import SupervisedSteps

_STEPS: Final[Mapping[type[Objective], type[JobSteps]]] = {
    Supervised: SupervisedSteps,
    Reinforcement: ReinforcedSteps,
    Distillation: DistilledSteps,
    KTO: LabelledSteps,
}


def make_steps(prepared: PreparedJob, base: Base) -> JobSteps:
    """Steps of a job, by its objective. Raises JobError where the job's saved state is of another job."""
    return _STEPS.get(type(prepared.objective), PreferenceSteps)(prepared, base)


class Training:
    """Starts jobs on one base, feeds the scheduler, and handles its events. Callers of `deliver`,
    `refuse_while_trained` and `refuse_taken` hold `lock`, the engine's; the other methods take it. `drive`
    steps the engine once, `save` writes an adapter's files.
    """

    def __init__(
        self,
        host: TrainingHost,
        sessions: Sessions,
        rollouts: Rollouts,
        save: Callable[[str, str | Path], None],
    ) -> None:
        self.jobs: dict[str, FineTuning] = {}  # that have not ended
        self.started = 0  # number of jobs started since the start
        self.admission, self._host, self._save = host.admission, host, save
        self._sessions, self._rollouts = sessions, rollouts

    def check(self, prepared: PreparedJob) -> JobNeeds:
        """Returns a job's needs. Raises AdapterError, ConfigError, DataError, or OutOfMemory where the job
        would not fit even alone."""
        with self._host.lock:
            prepared.check_objective(self._host.base.vocabulary)
            check_room(prepared.data.examples, self._host.base.max_positions, prepared.reserved)
            return self.admission.check(prepared)

    def start(
        self,
        prepared: PreparedJob,
        keeping: Keeping | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> FineTuning:
        """Starts a job, or queues it until its bytes are free and its session is open. `begun` is called
        between two steps once it has begun, or failed to. Raises what `check` does, and JobError."""
        with self._host.lock:
            check_name(prepared.adapter)
            self.refuse_while_trained(prepared.adapter)
            self.refuse_taken(prepared.job)
            needs = self.check(prepared)
            work = make_steps(prepared, self._host.base)
            handle = self.jobs[prepared.job] = FineTuning(work, self, keeping)
            if prepared.is_fresh and (note := left_untrained(self._host.base, prepared.methods)):
                handle.notes.append(note)
            start = partial(self._start, work, begun)
            if self.admission.enter(prepared.job, needs, start):
                start()
                if handle.error is not None:
                    raise handle.error
            self.started += 1
            return handle

    def set_weight(self, job: str, weight: float) -> None:
        """Changes a running job's share among the jobs that train."""
        with self._host.lock:
            if not weight > 0:
                raise ConfigError(f"a job's weight must be positive, not {weight}")
            handle = self.jobs.get(job)
            if handle is None or handle.status is not JobStatus.RUNNING:
                raise JobError(f"no job {job!r} is running")
            handle.weight = weight
            self._host.scheduler.training.set_weight(job, weight)

    def refuse_while_trained(self, adapter: str) -> None:
        """Raises JobError if a session, or a job that runs or is queued, trains the adapter."""
        busy = [job for job, handle in self.jobs.items() if handle.adapter == adapter]
        busy += [name for name, client in self._sessions.clients.items() if client.adapter == adapter]
        if busy:
            raise JobError(f"adapter {adapter!r} is being trained by {busy[0]}")

    def refuse_taken(self, job: str) -> None:
        """Raises JobError if there is a job or a session of this name."""
        if job in self.jobs or job in self._sessions.clients or self.admission.has(job):
            raise JobError(f"there is a job {job!r} already, and it has not ended")

    def deliver(self, event: PassDone | StepDone | JobFailed) -> None:
        """Handles a step's event for a job."""
        if (handle := self.jobs.get(event.job)) is None or (work := handle.work) is None:
            return
        try:
            if isinstance(event, PassDone):
                work.passed(event.outputs)
                self._feed(work)
            elif isinstance(event, StepDone):
                handle.take(work.ended(event.updated))
                if handle.is_under_way:  # a listener to the step may have ended the job
                    self._feed(work)
            elif not self._goes_on_smaller(event, handle, work):
                self._fail(event.job, event.error)
        except BaseException as error:
            self._fail(event.job, contained(error, f"job {event.job}", JobError))

    # For handles

    def drive(self) -> bool:
        """See `Trainer`."""
        return self._host.drive()

    def reason(self, job: str) -> str:
        """See `Trainer`."""
        with self._host.lock:
            return self.admission.reason(job)

    def save(self, adapter: str, folder: str | Path) -> None:
        """See `Trainer`."""
        self._save(adapter, folder)

    def end(self, job: str, status: JobStatus) -> None:
        """See `Trainer`."""
        with self._host.lock:
            self._end(job, lambda handle: handle.end(status))

    def snapshot(self, job: str) -> StateSnapshot:
        """See `Trainer`."""
        with self._host.lock:
            handle = self.jobs.get(job)
            if handle is None or handle.work is None:
                raise JobError(f"job {job!r} has ended")
            if handle.status is JobStatus.RUNNING:
                executor, loss = self._host.executor, handle.work.loss
                mark = executor.call(MarkState(job))

                def read() -> TrainingState:
                    state = executor.call(ReadState(mark.snapshot))
                    return state if loss is None else replace(state, loss=loss)

                return StateSnapshot(mark.step, read)
            if (resumed := handle.work.prepared.resume) is not None:
                return StateSnapshot(resumed.step, lambda: resumed)
            raise JobError(f"job {job!r} has not begun")

    # Inside

    def _start(self, work: JobSteps, begun: Callable[[], None]) -> None:
        """Opens the session of a job whose bytes are reserved, and begins it; fails it where that raises."""
        prepared = work.prepared

        def opened(outcome: KnownVersion | CoserveError) -> None:
            try:
                if isinstance(outcome, CoserveError):
                    raise outcome
                work.opened(outcome.key)
                self._begin(work)
            except BaseException as error:
                self._fail(prepared.job, contained(error, f"job {prepared.job}", JobError))
            begun()

        try:
            if not prepared.is_fresh:
                for _, bypass in prepared.first.placed():
                    if bypass.note:
                        warnings.warn(f"{prepared.first.name}: {bypass.note}", stacklevel=4)
            version = self._host.bank.next_version(prepared.adapter, self._host.base_id)
            command = OpenSession.of(prepared, version, work.session, work.identity)
            self._host.openings.open(command, opened)
        except BaseException as error:
            self._fail(prepared.job, contained(error, f"job {prepared.job}", JobError))
            begun()

    def _begin(self, work: JobSteps) -> None:
        job = work.prepared.job
        self.jobs[job].begin()
        if isinstance(work, ReinforcedSteps):
            self._rollouts.start(work, partial(self._answered, job))
        self._feed(work)

    def _answered(self, job: str) -> None:
        """Continues a job whose next answers have been sampled, unless it still trains on earlier ones."""
        with self._host.lock:
            handle = self.jobs.get(job)
            if handle is not None and handle.work is not None and not handle.work.is_under_way:
                self._feed(handle.work)

    def _feed(self, work: JobSteps) -> None:
        """Gives the scheduler the job's next work, or ends the job."""
        if (made := work.next_work(iter(self._host.scheduler.new_key, None))) is not None:
            self._add(work.prepared.job, made)
        elif work.is_over:
            self.end(work.prepared.job, JobStatus.SUCCEEDED)

    def _add(self, job: str, made: StepWork) -> None:
        weight, is_pass = self.jobs[job].weight, made.update is None
        self._host.scheduler.training.add(
            job, made.micro_batches, weight, made.update, is_pass, self._host.base_id
        )

    def _goes_on_smaller(self, event: JobFailed, handle: FineTuning, work: JobSteps) -> bool:
        """Repeats the step of a job that ran out of memory with leaner settings, once; True if it does."""
        if not isinstance(event.error, OutOfMemory) or handle.has_shrunk or not work.is_under_way:
            return False
        made = work.smaller_work(iter(self._host.scheduler.new_key, None))
        self._host.executor.call(RestartStep(event.job, work.session))
        self.admission.shrink(work.prepared)
        handle.has_shrunk = True
        handle.notes.append(
            f"{event.error}; step {work.step + 1} runs again, and the job goes on, with "
            f"rows={work.config.rows}, keep={SavePolicy.INPUTS.value}"
        )
        self._add(event.job, made)
        return True

    def _fail(self, job: str, error: CoserveError) -> None:
        self._end(job, lambda handle: handle.fail(error))

    def _end(self, job: str, mark: Callable[[FineTuning], None]) -> None:
        """Ends a job, if it has not ended: marks its handle, and drops the handle and what is planned for it.
        Its published version stays."""
        if (handle := self.jobs.get(job)) is not None:
            leave = partial(self.admission.leave, job)
            is_gone = self._host.openings.close(job, leave)  # where that raises, the job goes on
            mark(handle)
            self._rollouts.drop(job)
            self._host.scheduler.training.remove(job)
            self.jobs.pop(job, None)
            if is_gone:
                leave()
