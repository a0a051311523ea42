"""Admission of fine-tuning jobs and training sessions by bytes. Both are jobs here.

A job reserves the most bytes it can need before any of it is allocated. A job that would not fit even alone
is refused, with settings that would fit; a job that does not fit now waits until others have ended. Jobs
start in order of arrival, so small jobs cannot starve a large one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from coserve.adapters.activation import invocation_of
from coserve.adapters.replace import expect_exact
from coserve.core.size import show_size, show_sizes
from coserve.engine.memory import EngineMemory, base_owner, job_owner
from coserve.errors import AdapterError, OutOfMemory
from coserve.executors.executor import Executor, ReadMemory, SetLimits
from coserve.memory.ledger import Account, Bytes
from coserve.memory.malloc import return_freed_memory
from coserve.model.base import Base
from coserve.schedule.config import SchedulerConfig
from coserve.train.fitting import settings_that_fit
from coserve.train.job import PreparedJob
from coserve.train.needs import JobNeeds, Steps, backward_bytes, replayed_bytes
from coserve.train.objectives import Reinforcement

_BACKWARD: Final = "backward"  # ledger owner of the bytes of one backward pass
# Freed memory is returned to the system after so many jobs have left. 200 jobs of the embedded model left
# 0.04 MB in use, but the resident size grew by 2.6 MB, as blocks of many sizes spread over memory that is
# kept. With memory returned after every 25th job it stayed within 0.3 MB over 375. Returning takes 0.2 to
# 0.4 ms a MiB.
_JOBS_UNTIL_RETURNED: Final = 16


@dataclass(slots=True)
class JobLine:
    """Jobs of all bases of an engine that wait for bytes, the next one first, each with the call that starts
    it; and each base's admission."""

    waiting: dict[str, Callable[[], None]] = field(default_factory=dict)
    admissions: list["Admission"] = field(default_factory=list)

    def of(self, name: str) -> "Admission | None":
        """The admission that a job or session of this name has entered and not left."""
        return next((one for one in self.admissions if name in one._needs), None)


class Admission:
    """Admits jobs of one base as far as bytes allow. Those of all bases of an engine wait in one `line`. All
    methods run between two steps."""

    def __init__(
        self,
        memory: EngineMemory,
        executor: Executor,
        base: Base,
        config: SchedulerConfig,
        steps: Steps,
        line: JobLine,
    ) -> None:
        """`steps` limits what one job may have under way at once."""
        self._memory, self._executor, self._base, self.steps = memory, executor, base, steps
        self._base_owner = base_owner("base", memory.base_id)
        self._backward_owner = base_owner(_BACKWARD, memory.base_id)
        # Computed once, as it looks at every linear. Nothing is replayed where layers are on a cluster.
        self._row_nbytes = max(replayed_bytes(base, 1), 1)
        self._ledger = memory.ledger
        self.line, self._waiting = line, line.waiting
        # Of all jobs that have entered, computed once: it takes most of a millisecond.
        self._needs: dict[str, JobNeeds] = {}
        line.admissions.append(self)
        self._left = 0  # jobs that have left since freed memory was returned
        self._reserved_rows = config.reserved_rows
        group = 0 if config.training_window is not None else config.reserved_rows
        executor.call(SetLimits(window_group_rows=group))
        self._window_groups = backward_bytes(base, group)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Jobs that wait for bytes, the next one first."""
        return tuple(self._waiting)

    def has(self, name: str) -> bool:
        """Tells whether a job or session of this name, on any base, has entered and not left."""
        return self.line.of(name) is not None

    def check(self, job: PreparedJob) -> JobNeeds:
        """A job's needs, for `enter`. Raises OutOfMemory, with settings that would fit, for a job that would
        not fit even alone, and AdapterError for one on an approximation."""
        for adapter in (job.first, job.reference):
            if adapter is not None:
                expect_exact(adapter)
        if invocation_of(job.first) and isinstance(job.objective, Reinforcement):
            raise AdapterError(
                "an adapter that acts from its invocation tokens on (aLoRA) learns from examples, pairs and "
                "teachers, not by reinforcement, whose sampled answers may have these tokens again"
            )
        needs, room = job.needs(self._base, self.steps), self._memory.job_room()
        if needs.total <= room:
            return needs
        found = settings_that_fit(self._base, job, self.steps, room)
        advice = f"it would fit with {', or '.join(found)}" if found else "no smaller setting would do"
        missing, budget = needs.total - room, self._ledger.budget
        raise OutOfMemory(
            f"job {job.job} needs {show_size(needs.total)} ({show_sizes(needs.parts)}), {show_size(missing)} "
            f"more than a job can have of the {show_size(budget)} there are, of which others have "
            f"{show_sizes(self._memory.beside_jobs())}: engine.memory of "
            f"{show_size(budget + missing, up=True)} is enough; {advice}"
        )

    def enter(self, name: str, needs: JobNeeds, start: Callable[[], None]) -> bool:
        """Reserves a job's bytes if they are free, and returns True. Otherwise the job waits, and `start` is
        called once the bytes are free."""
        self._needs[name] = needs
        if not self._waiting and self._take(name):
            return True
        self._waiting[name] = start
        return False

    def reason(self, name: str) -> str:
        """The reason for which a job waits; empty for one that does not."""
        if name not in self._waiting:
            return ""
        needed, first = show_size(self._needs[name].total), self.waiting[0]
        if name != first:
            return f"waits for {needed} of memory, behind job {first}"
        self._memory.count_adapters()
        missing = self._ledger.missing(self._wanted(name))
        running = [job for one in self.line.admissions for job in one._running]
        holders = f"job {', '.join(running)} ends" if running else "an adapter is unloaded"
        return f"waits for {needed} of memory, {show_size(missing)} more than are free, until {holders}"

    def shrink(self, job: PreparedJob) -> None:
        """Shrinks a job's reservation to that of leaner settings. Smaller micro-batches can add up to a few
        more rows. Where the bytes for these are missing, the reservation stays."""
        name = job.job
        self._ledger.charge(job_owner(name), Account.ACTIVATIONS, 0)
        before, self._needs[name] = self._needs[name], job.needs(self._base, self.steps)
        wanted = self._wanted(name)
        if self._ledger.missing(wanted):
            self._needs[name] = before
        else:
            self._reserve(wanted)
            self.advance()

    def leave(self, name: str) -> None:
        """Frees the bytes of a job that has ended or was cancelled, and starts jobs that wait."""
        self._waiting.pop(name, None)
        self._needs.pop(name, None)
        self._ledger.release(job_owner(name))
        self._set_backward()
        self._left += 1
        if self._left >= _JOBS_UNTIL_RETURNED:
            self._left = 0
            return_freed_memory()
        self.advance()

    def advance(self) -> None:
        """Starts waiting jobs in their order, as far as bytes allow."""
        while self._waiting:
            name, start = next(iter(self._waiting.items()))
            admission = self.line.of(name)
            assert admission is not None, "who waits has entered"
            if not admission._take(name):
                break
            start()
        self._memory.count_adapters()

    def window_rows(self) -> int:
        """Most rows of a window that runs alone in the next step. Bytes that are free now are lent to it for
        that step, beyond its reservation."""
        nbytes = self._ledger.of(self._backward_owner) + self._memory.free_now()
        return max(self._reserved_rows, nbytes // self._row_nbytes)

    # Inside

    def _take(self, name: str) -> bool:
        """Reserves a job's bytes if they are free, or can be freed by evicting unused stored adapters."""
        wanted = self._wanted(name)
        if self._memory.make_room(lambda: self._ledger.missing(wanted)):
            return False
        self._waiting.pop(name, None)
        self._reserve(wanted)
        return True

    def _reserve(self, wanted: dict[str, Bytes]) -> None:
        self._ledger.reserve(wanted)
        self._set_backward()

    def _wanted(self, name: str) -> dict[str, Bytes]:
        """Bytes of a job, with those that any training needs: weights unpacked for backward, and the rows of
        one backward pass."""
        needs, held = self._needs[name], self._executor.call(ReadMemory())
        return {
            job_owner(name): needs.own,
            self._backward_owner: {
                Account.WORKSPACES: self._backward({**self._running, name: needs}.values())
            },
            self._base_owner: {Account.BASE: held.base + held.base_backward},
        }

    @property
    def _running(self) -> dict[str, JobNeeds]:
        return {name: needs for name, needs in self._needs.items() if name not in self._waiting}

    def _backward(self, jobs: Iterable[JobNeeds]) -> int:
        """Bytes of one backward pass over these jobs' windows: the largest job's, or those of a window
        group."""
        shared = [job.shared for job in jobs]
        return max(max(shared, default=0), min(sum(shared), self._window_groups))

    def _set_backward(self) -> None:
        """Reserves the backward bytes of all admitted jobs, and limits stored activations to what is
        reserved."""
        nbytes = self._backward(self._running.values())
        self._ledger.reserve({self._backward_owner: {Account.WORKSPACES: nbytes}})
        kept = sum(self._ledger.of(job_owner(name), Account.ACTIVATIONS) for name in self._running)
        room = self._memory.graph_room() if self._executor.spec.graphs else None
        self._executor.call(SetLimits(activation_nbytes=kept, graph_store_nbytes=room))
