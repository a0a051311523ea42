"""All fine-tuning on one engine: jobs that wait for bytes, jobs that train, and what becomes of them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coserve.adapters.adapter import AdapterVersion
from coserve.core.contained import contained
from coserve.core.events import JobFailed, StepDone
from coserve.core.sequence import MicroBatch
from coserve.engine.admission import Admission
from coserve.engine.handles import FineTuning, Keeping
from coserve.errors import ConfigError, CoserveError, JobError, OutOfMemory
from coserve.executors.local import LocalExecutor
from coserve.memory.exhausted import is_out_of_memory
from coserve.schedule.scheduler import Scheduler
from coserve.train.config import TrainingConfig
from coserve.train.example import Prepared, check_room
from coserve.train.fitting import JobSize, Rank
from coserve.train.fresh import fresh_adapter, sketch_adapter
from coserve.train.save_policy import SavePolicy
from coserve.train.state import TrainingState
from coserve.train.supervised import SupervisedSteps, count_steps

Methods = object | Sequence[object]  # settings of an adapter's method, or of several


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A fine-tuning job as it was asked for. `start` is the version that training begins with, None for a
    fresh one; `resume` where the same job stood before."""

    job: str
    adapter: str
    data: Prepared
    method: Methods
    config: TrainingConfig
    start: AdapterVersion | None = None
    resume: TrainingState | None = None


class Training:
    """Starts jobs, feeds the scheduler, and takes in what happened. Whoever calls holds `lock`, the engine's;
    handles take it themselves. `drive` steps the engine once, `save` writes an adapter's files.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        scheduler: Scheduler,
        admission: Admission,
        drive: Callable[[], bool],
        save: Callable[[str, str | Path], None],
        lock: AbstractContextManager[bool],
    ) -> None:
        self.jobs: dict[str, FineTuning] = {}  # that have not ended
        self.started = 0  # jobs that ever were
        self._executor, self._scheduler, self._admission = executor, scheduler, admission
        self._base, self._bank = executor.base, executor.bank
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
        self.refuse_while_trained(asked.adapter)
        if asked.job in self.jobs:
            raise JobError(f"there is a job {asked.job!r} already, and it has not ended")
        size = self.check(asked)
        handle = FineTuning(
            asked.job, asked.adapter, count_steps(len(asked.data.examples), asked.config),
            self._drive, partial(self._end, asked.job), partial(self._save, asked.adapter),
            partial(self._state, asked.job), asked.data.truncated, asked.data.dropped, keeping,
        )  # fmt: skip
        handle.weight = asked.config.weight
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

    def _end(self, job: str, status: str) -> None:
        """Ends a job that has not ended; all it held is free."""
        with self._lock:
            if (handle := self.jobs.get(job)) is not None:
                handle.end(status)
                self._forget(job)

    def _state(self, job: str) -> TrainingState:
        """State of a job. Raises JobError where there is none."""
        with self._lock:
            if job in self._steps:
                return self._executor.sessions[job].state()
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

        return JobSize(sketch(asked.method), lengths, asked.config, _rank_of(asked.method, sketch))

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
        first = self._first(asked)
        data, virtual = asked.data, first.virtual
        steps = SupervisedSteps(
            asked.job, first.key, data.examples, asked.config, self._base.depth, self._base.row_buckets,
            virtual.given_count, virtual.prompt_count, data.digest, asked.resume.step if asked.resume else 0,
        )  # fmt: skip
        if asked.resume is not None:
            steps.identity.expect(asked.resume.identity)
        try:
            self._executor.open_session(asked.job, first, steps.session, steps.identity, asked.resume)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(f"job {asked.job}: there is no memory for its adapter") from error
        self._steps[asked.job] = steps

    def _first(self, asked: JobSpec) -> AdapterVersion:
        """The adapter that training starts from, under a version number that nobody has."""
        if asked.start is None:
            first = fresh_adapter(self._base, asked.adapter, asked.method, asked.config.seed)
        else:
            first = asked.start
            for _, bypass in first.placed():
                if bypass.note:
                    warnings.warn(f"{first.name}: {bypass.note}", stacklevel=5)
        return replace(first, name=asked.adapter, version=self._bank.next_version(asked.adapter))

    def _begin(self, job: str) -> None:
        self.jobs[job].begin()
        self._feed(job)

    def _feed(self, job: str) -> None:
        """Gives the scheduler the job's next optimizer step, or ends the job."""
        micro_batches = self._steps[job].next_step(iter(self._scheduler.new_key, None))
        if micro_batches:
            self._add(job, micro_batches)
        else:
            self._end(job, "succeeded")

    def _add(self, job: str, micro_batches: Sequence[MicroBatch]) -> None:
        weight, update = self.jobs[job].weight, self._steps[job].optim_step
        self._scheduler.add_training(job, micro_batches, weight, update)

    def _goes_on_smaller(self, event: JobFailed) -> bool:
        """Has a job that ran out of memory do its step again with less, once, and tells whether it does."""
        steps, handle = self._steps[event.job], self.jobs[event.job]
        if not isinstance(event.error, OutOfMemory) or handle.notes or not steps.is_under_way:
            return False
        micro_batches = steps.smaller_step(iter(self._scheduler.new_key, None))
        self._executor.restart_step(event.job, steps.session)
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
        self._executor.close_session(job)
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
