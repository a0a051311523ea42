"""All fine-tuning on one engine: jobs that wait for bytes, jobs that train, and what becomes of them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank, check_name
from coserve.adapters.paging.stored import KnownVersion
from coserve.core.contained import contained
from coserve.core.events import JobFailed, StepDone
from coserve.core.job_status import JobStatus
from coserve.core.sequence import MicroBatch
from coserve.engine.admission import Admission
from coserve.engine.finetuning import FineTuning, JobSpec, Keeping
from coserve.errors import ConfigError, CoserveError, JobError, OutOfMemory
from coserve.executors.executor import (
    CloseSession,
    Executor,
    FreshAdapter,
    OpenSession,
    RestartStep,
    SaveState,
)
from coserve.model.base import Base
from coserve.schedule.scheduler import Scheduler
from coserve.train.example import check_room
from coserve.train.fitting import JobSize, Rank
from coserve.train.fresh import sketch_adapter
from coserve.train.save_policy import SavePolicy
from coserve.train.state import TrainingState
from coserve.train.supervised import SupervisedSteps, count_steps

Methods = object | Sequence[object]  # settings of an adapter's method, or of several


class Training:
    """Starts jobs, feeds the scheduler, and takes in what happened. Whoever calls holds `lock`, the engine's;
    handles take it themselves. `drive` steps the engine once, `save` writes an adapter's files.
    """

    def __init__(
        self,
        executor: Executor,
        base: Base,
        bank: AdapterBank,
        scheduler: Scheduler,
        admission: Admission,
        drive: Callable[[], bool],
        save: Callable[[str, str | Path], None],
        lock: AbstractContextManager[bool],
    ) -> None:
        self.jobs: dict[str, FineTuning] = {}  # that have not ended
        self.started = 0  # jobs that ever were
        self._executor, self._scheduler, self._admission = executor, scheduler, admission
        self._base, self._bank = base, bank
        self._drive, self._save, self._lock = drive, save, lock
        self._queued: dict[str, JobSpec] = {}
        self._steps: dict[str, SupervisedSteps] = {}  # of jobs that train

    def check(self, asked: JobSpec) -> JobSize:
        """Returns how large a job is. Raises what makes it impossible: AdapterError, DataError, and
        OutOfMemory where it could not run even if it were alone."""
        size = self._size(asked)
        check_room(asked.data.examples, self._base.max_positions, size.adapter.virtual.count)
        self._admission.check(asked.job, size)
        return size

    def start(self, asked: JobSpec, keeping: Keeping | None = None) -> FineTuning:
        """A job that trains at once, or waits for bytes. Raises what `check` does, and JobError."""
        check_name(asked.adapter)
        self.refuse_while_trained(asked.adapter)
        if asked.job in self.jobs:
            raise JobError(f"there is a job {asked.job!r} already, and it has not ended")
        size = self.check(asked)
        steps = count_steps(len(asked.data.examples), asked.config)
        handle = FineTuning(asked, steps, self, keeping)
        if self._admission.enter(asked.job, size, partial(self._start_later, asked), handle.wait):
            try:
                self._open(asked)
            except BaseException:
                self._admission.leave(asked.job)
                raise
            self.jobs[asked.job] = handle
            try:
                self._begin(asked.job)
            except BaseException as error:
                self._fail(asked.job, contained(error, f"job {asked.job}", JobError))
                raise
        else:
            self.jobs[asked.job], self._queued[asked.job] = handle, asked
        self.started += 1
        return handle

    def set_weight(self, job: str, weight: float) -> None:
        """Changes a running job's share among the jobs that train."""
        if not weight > 0:
            raise ConfigError(f"a job's weight must be positive, not {weight}")
        if job not in self._steps:
            raise JobError(f"no job {job!r} is running")
        self.jobs[job].weight = weight
        self._scheduler.set_training_weight(job, weight)

    def refuse_while_trained(self, adapter: str) -> None:
        """Raises JobError if a job trains the adapter, or is going to."""
        busy = [job for job, handle in self.jobs.items() if handle.adapter == adapter]
        if busy:
            raise JobError(f"adapter {adapter!r} is being trained by {busy[0]}")

    def deliver(self, event: StepDone | JobFailed) -> None:
        """Takes in what a step did for a job."""
        if (handle := self.jobs.get(event.job)) is None:
            return
        try:
            if isinstance(event, StepDone):
                self._steps[event.job].ended(event.updated.version)
                handle.take(event)
                if handle.is_under_way:  # whoever was told of the step may have ended the job
                    self._feed(event.job)
            elif not self._goes_on_smaller(event):
                self._fail(event.job, event.error)
        except BaseException as error:
            self._fail(event.job, contained(error, f"job {event.job}", JobError))

    # For handles

    def drive(self) -> bool:
        """See `Trainer`."""
        return self._drive()

    def save(self, adapter: str, folder: str | Path) -> None:
        """See `Trainer`."""
        self._save(adapter, folder)

    def end(self, job: str, status: JobStatus) -> None:
        """See `Trainer`."""
        with self._lock:
            if (handle := self.jobs.get(job)) is not None:
                handle.end(status)
                self._forget(job)

    def state(self, job: str) -> TrainingState:
        """See `Trainer`."""
        with self._lock:
            if job in self._steps:
                return self._executor.call(SaveState(job))
            queued = self._queued.get(job)
            if queued is not None and queued.resume is not None:
                return queued.resume
            raise JobError(f"job {job!r} has {'ended' if queued is None else 'not begun'}")

    # Inside

    def _size(self, asked: JobSpec) -> JobSize:
        """Without the memory of an adapter that is not there yet."""
        lengths = [len(example) for example in asked.data.examples]
        if asked.start is not None:
            return JobSize(asked.start, lengths, asked.config)

        def sketch(method: Methods) -> AdapterVersion:
            return sketch_adapter(self._base, asked.adapter, method, asked.config.seed)

        return JobSize(self._shapes(asked), lengths, asked.config, _rank_of(asked.method, sketch))

    def _shapes(self, asked: JobSpec) -> AdapterVersion:
        """The adapter that a job begins with; of a fresh one the shapes alone."""
        if asked.start is not None:
            return asked.start
        return sketch_adapter(self._base, asked.adapter, asked.method, asked.config.seed)

    def _start_later(self, asked: JobSpec) -> None:
        """Begins a job whose bytes are free now, or fails it."""
        del self._queued[asked.job]
        try:
            self._open(asked)
            self._begin(asked.job)
        except BaseException as error:
            self._fail(asked.job, contained(error, f"job {asked.job}", JobError))

    def _open(self, asked: JobSpec) -> None:
        """Opens a job's session, which its first step is ready for."""
        virtual, data, resume = self._shapes(asked).virtual, asked.data, asked.resume
        version = self._bank.next_version(asked.adapter)
        steps = SupervisedSteps(
            asked.job, f"{asked.adapter}@{version}", data.examples, asked.config, self._base.depth,
            self._base.row_buckets, virtual.given_count, virtual.prompt_count, data.digest,
            resume.step if resume else 0,
        )  # fmt: skip
        if resume is not None:
            steps.identity.expect(resume.identity)
        start = asked.start
        if start is not None:
            for _, bypass in start.placed():
                if bypass.note:
                    warnings.warn(f"{start.name}: {bypass.note}", stacklevel=5)
        fresh = FreshAdapter.of(asked.methods, asked.config.seed) if start is None else None
        outline = self._executor.call(
            OpenSession(
                asked.job, asked.adapter, version, steps.session, start, fresh, steps.identity, resume
            )
        )
        self._bank.publish(KnownVersion(asked.adapter, version, outline))
        self._steps[asked.job] = steps

    def _begin(self, job: str) -> None:
        self.jobs[job].begin()
        self._feed(job)

    def _feed(self, job: str) -> None:
        """Gives the scheduler the job's next optimizer step, or ends the job."""
        micro_batches = self._steps[job].next_step(iter(self._scheduler.new_key, None))
        if micro_batches:
            self._add(job, micro_batches)
        else:
            self.end(job, JobStatus.SUCCEEDED)

    def _add(self, job: str, micro_batches: Sequence[MicroBatch]) -> None:
        weight, update = self.jobs[job].weight, self._steps[job].optim_step
        self._scheduler.add_training(job, micro_batches, weight, update)

    def _goes_on_smaller(self, event: JobFailed) -> bool:
        """Has a job that ran out of memory do its step again with less, once, and tells whether it does."""
        steps, handle = self._steps[event.job], self.jobs[event.job]
        if not isinstance(event.error, OutOfMemory) or handle.notes or not steps.is_under_way:
            return False
        micro_batches = steps.smaller_step(iter(self._scheduler.new_key, None))
        self._executor.call(RestartStep(event.job, steps.session))
        self._admission.shrink(event.job, steps.config)
        handle.notes.append(
            f"{event.error}; step {steps.step + 1} runs again, and the job goes on, with "
            f"rows={steps.config.rows}, keep={SavePolicy.INPUTS.value}"
        )
        self._add(event.job, micro_batches)
        return True

    def _fail(self, job: str, error: CoserveError) -> None:
        if (handle := self.jobs.get(job)) is not None:
            handle.fail(error)
            self._forget(job)

    def _forget(self, job: str) -> None:
        """Frees all a job held, its handle too unless its caller has it; its published version stays."""
        self._executor.call(CloseSession(job))
        self._scheduler.remove_training(job)
        self._queued.pop(job, None)
        self._steps.pop(job, None)
        self.jobs.pop(job, None)
        self._admission.leave(job)


def _rank_of(method: Methods, sketch: Callable[[Methods], AdapterVersion]) -> Rank | None:
    """The rank of an adapter of one method that has one."""
    rank = getattr(method, "rank", None)
    if isinstance(method, Sequence) and len(method) == 1:
        return _rank_of(method[0], sketch)
    if not isinstance(rank, int):
        return None
    return Rank(rank, lambda lower: sketch(replace(method, rank=lower)))  # type: ignore[type-var]
