"""Admission by bytes: the engine's side of the ledger.

The base, the pages and what a step needs have theirs for good. A job reserves all it can come to need before
anything of it is made. One that could not have that if it were alone is refused, with settings that would
fit; one that cannot have it now waits, and starts when others have left. Jobs start in the order in which
they came: a small one does not pass a large one for ever.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.cache import AdapterCache
from coserve.config import EngineConfig
from coserve.core.size import read_memory, show_size
from coserve.errors import ConfigError, OutOfMemory
from coserve.executors.executor import DeviceMemory, Executor, ReadMemory, SetLimits
from coserve.memory.budget import Capacity, budget_of, process_capacity
from coserve.memory.compiled import BUILT_BYTES, bound_compiled_shapes
from coserve.memory.ledger import Account, Bytes, Ledger
from coserve.memory.malloc import resident_bytes, return_freed_memory
from coserve.memory.measured import make_meter
from coserve.model.base import Base
from coserve.model.load import usable_device
from coserve.schedule.config import SchedulerConfig
from coserve.train.config import TrainingConfig
from coserve.train.fitting import JobSize, settings_that_fit
from coserve.train.needs import JobNeeds, Steps, backward_bytes, step_bytes

_ADAPTERS: Final = "adapters"
_STORED: Final = "stored adapters"  # those that lie on disk, too
_LIBRARIES: Final = "libraries"
_BACKWARD: Final = "backward"  # what rows need on their way back, at a time
# Jobs that have left between two times at which freed memory goes back. What 200 jobs of the embedded model
# left in use was 0.04 MB, but blocks of many sizes spread over memory that is kept: the resident size grew by
# 2.6 MB; with memory given back after every 25th it stayed within 0.3 MB over 375.
# Giving back takes 0.2 to 0.4 ms a MiB.
_JOBS_UNTIL_RETURNED: Final = 16


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A job that waits: `start` begins it, `tell` is given the reason why it has not begun."""

    name: str
    size: JobSize
    start: Callable[[], None]
    tell: Callable[[str], None]


class Admission:
    """The ledger of one engine, and the jobs that wait for bytes. Everything happens between two steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Made before the model is loaded: what is free then is what there is to be had. Raises ConfigError
        where the device cannot be used."""
        device = usable_device(config.device)
        bound_compiled_shapes()
        self.meter = make_meter(device)
        self.imports = resident_bytes()  # of the process so far: no budget counts it
        self.ledger = Ledger(budget_of(config.memory, device_capacity(device)))
        self._limit = _limit_of(config, self.ledger.budget)
        self._waiting: deque[_Candidate] = deque()
        self._jobs: dict[str, JobSize] = {}
        self._left = 0  # jobs, since freed memory was given back

    def open(
        self, executor: Executor, base: Base, cache: AdapterCache, config: SchedulerConfig, steps: Steps
    ) -> None:
        """Enters what is there for good. Raises ConfigError where that is more than the budget."""
        self._executor, self._base, self._cache, self._steps = executor, base, cache, steps
        group = 0 if config.training_window is not None else config.max_training_rows
        executor.call(SetLimits(window_group_rows=group))
        self._window_groups = backward_bytes(base, group)
        weights, pages = self._memory().base, executor.spec.cache_nbytes
        workspace = step_bytes(base, config, pages)
        fixed: dict[str, Bytes] = {
            "base": {Account.BASE: weights},
            "pages": {Account.PAGES: pages},
            "steps": {Account.WORKSPACES: workspace},
        }
        if missing := self.ledger.missing(fixed):
            raise ConfigError(
                f"engine.memory: {show_size(self.ledger.budget)} are {show_size(missing)} too few for the "
                f"model ({show_size(weights)}), the cache ({show_size(pages)}; engine.cache_tokens) and a "
                f"step ({show_size(workspace)})"
            )
        self.ledger.reserve(fixed)
        if self._limit is not None:
            asked = {_STORED: {Account.ADAPTERS: self._limit}}
            if missing := self.ledger.missing(asked):
                raise ConfigError(
                    f"engine.adapter_memory: {show_size(self._limit)} are {show_size(missing)} more than "
                    f"engine.memory ({show_size(self.ledger.budget)}) leaves beside model, cache and a step"
                )
            self.ledger.reserve(asked)

    def count_process(self, grown: int | None = None) -> None:
        """Counts what libraries took and will take beside the model, in a process that has nothing else to
        do. What it holds beyond its imports stays within the budget then: freed memory that the C library
        keeps goes back to the system where it would not. On a GPU none of this is in its memory. `grown` is
        what loading took beside the model, where this process does not tell. Raises ConfigError where there
        is no room."""
        if self._base.device.type != "cpu":
            return
        nbytes = (self._executor.spec.grown if grown is None else grown) + BUILT_BYTES
        wanted = {_LIBRARIES: {Account.LIBRARIES: nbytes}}
        if missing := self.ledger.missing(wanted):
            raise ConfigError(
                f"engine.memory: {show_size(self.ledger.budget)} are {show_size(missing)} too few beside "
                f"model, cache and a step for what libraries take in this process ({show_size(nbytes)})"
            )
        self.ledger.reserve(wanted)

    # Jobs

    @property
    def waiting(self) -> tuple[str, ...]:
        """Jobs that wait for bytes, the next one first."""
        return tuple(candidate.name for candidate in self._waiting)

    def check(self, name: str, job: JobSize) -> None:
        """Raises OutOfMemory, with settings that would fit, where a job could not even run alone."""
        needs, room = job.needs(self._base, self._steps), self._room()
        if needs.total <= room:
            return
        found = settings_that_fit(self._base, job, self._steps, room)
        advice = f"it would fit with {', or '.join(found)}" if found else "no smaller setting would do"
        raise OutOfMemory(
            f"job {name} needs {show_size(needs.total)} ({_listed(needs)}), {show_size(needs.total - room)} "
            f"more than a job can have of the {show_size(self.ledger.budget)} there are; {advice}"
        )

    def enter(self, name: str, size: JobSize, start: Callable[[], None], tell: Callable[[str], None]) -> bool:
        """Reserves a job's bytes if they are free, and returns True. If not the job waits: `start` is called
        when it has them, `tell` with the reason whenever that changes."""
        self._count_adapters()
        if not self._waiting:
            wanted = self._wanted(name, size)
            self._shed(partial(self.ledger.missing, wanted))
            if not self.ledger.missing(wanted):
                self._take(name, size)
                return True
        self._waiting.append(_Candidate(name, size, start, tell))
        self._tell()
        return False

    def shrink(self, name: str, config: TrainingConfig) -> None:
        """A job goes on with leaner settings: the rest of what it had is free. Smaller micro-batches can be a
        few rows more together; where not even these are free it keeps what it had."""
        self.ledger.charge(_owner(name), Account.TAPES, 0)
        size = replace(self._jobs[name], config=config)
        if not self.ledger.missing(self._wanted(name, size)):
            self._take(name, size)
            self.advance()

    def leave(self, name: str) -> None:
        """A job is over, or nobody wants it any more; others may start now."""
        self._waiting = deque(candidate for candidate in self._waiting if candidate.name != name)
        self._jobs.pop(name, None)
        self.ledger.release(_owner(name))
        self._set_backward()
        self._left += 1
        if self._left >= _JOBS_UNTIL_RETURNED:
            self._left = 0
            return_freed_memory()
        self.advance()

    def advance(self) -> None:
        """Starts those that wait, in their order, as far as bytes go."""
        self._count_adapters()
        while self._waiting:
            first = self._waiting[0]
            wanted = self._wanted(first.name, first.size)
            self._shed(partial(self.ledger.missing, wanted))
            if self.ledger.missing(wanted):
                break
            self._waiting.popleft()
            self._take(first.name, first.size)
            first.start()
        self._tell()

    # Adapters

    def load(self, adapter: AdapterVersion) -> None:
        """Makes sure that there is room for a version that is to be published. Raises OutOfMemory."""

        def short() -> int:
            held = self.ledger.of(_ADAPTERS)
            return self.ledger.missing({_ADAPTERS: {Account.ADAPTERS: held + adapter.nbytes}})

        self._count_adapters()
        self._shed(short)
        if missing := short():
            raise OutOfMemory(
                f"the adapter {adapter.name!r} needs {show_size(adapter.nbytes)}, {show_size(missing)} more "
                "than are free: unload others, let jobs end, or raise engine.memory"
            )

    def room(self) -> int:
        """Bytes that stored adapters in memory may have together: what was set, or what nobody else has."""
        if self._limit is not None:
            return self._limit
        self._count_adapters()
        return self.ledger.free + self.ledger.of(_STORED)

    def fit(self, name: str, cost: int) -> None:
        """Raises OutOfMemory for a stored adapter that would never fit, if it were alone."""
        most = self._room() if self._limit is None else self._limit
        if cost > most:
            raise OutOfMemory(
                f"the adapter {name!r} needs {show_size(cost)} of memory, {show_size(cost - most)} more than "
                "adapters may have: raise engine.adapter_memory or engine.memory"
            )

    # What there is

    def audit(self) -> dict[Account, int]:
        """Charges what is held in fact; bytes by account then."""
        held = self._memory()
        self._count_adapters()
        self.ledger.charge("base", Account.BASE, held.base)
        for job, accounts in held.sessions.items():
            for account, nbytes in accounts.items():
                self.ledger.charge(_owner(job), account, nbytes)
        if self.ledger.of(_LIBRARIES) and resident_bytes() > self.imports + self.ledger.budget:
            return_freed_memory()
        return self.ledger.accounts()

    # Inside

    def _wanted(self, name: str, size: JobSize) -> dict[str, Bytes]:
        """Bytes of a job, with those that training as such needs: weights laid out for the way back, and room
        for the rows that go back at a time."""
        needs = size.needs(self._base, self._steps)
        others = (other for job, other in self._jobs.items() if job != name)
        held = self._memory()
        return {
            _owner(name): needs.own,
            _BACKWARD: {Account.WORKSPACES: self._backward([size, *others])},
            "base": {Account.BASE: held.base + held.base_to_train},
        }

    def _backward(self, jobs: Iterable[JobSize]) -> int:
        """Windows of several jobs go back together, with no more rows than one may have."""
        shared = [job.needs(self._base, self._steps).shared for job in jobs]
        return max(max(shared, default=0), min(sum(shared), self._window_groups))

    def _take(self, name: str, size: JobSize) -> None:
        self.ledger.reserve(self._wanted(name, size))
        self._jobs[name] = size
        self._set_backward()

    def _set_backward(self) -> None:
        """Reserves what the jobs that are there need together: never more than before, unless it was
        reserved."""
        self.ledger.reserve({_BACKWARD: {Account.WORKSPACES: self._backward(self._jobs.values())}})
        self._executor.call(SetLimits(tape_nbytes=self.ledger.accounts()[Account.TAPES]))

    def _room(self) -> int:
        """Bytes that a job could have if it were alone, with no adapter loaded."""
        fixed, held = sum(map(self.ledger.of, ("pages", "steps", _LIBRARIES))), self._memory()
        return self.ledger.budget - fixed - (self._limit or 0) - held.base - held.base_to_train

    def _memory(self) -> DeviceMemory:
        return self._executor.call(ReadMemory())

    def _count_adapters(self) -> None:
        """Versions that no job counts as its own: loaded ones, finished ones, and those that answers hold."""
        held = self._memory()
        nbytes = self._cache.nbytes(held.slots)
        own = sum(accounts[Account.ADAPTERS] for accounts in held.sessions.values())
        self.ledger.charge(_STORED, Account.ADAPTERS, nbytes.paged)
        self.ledger.charge(_ADAPTERS, Account.ADAPTERS, nbytes.resident - own)

    def _shed(self, missing: Callable[[], int]) -> None:
        """Has stored adapters that nobody uses leave, if that is enough. What was set for them is theirs.

        The slot of one that left may stay for the next one: then more have to leave.
        """
        before = -1
        while self._limit is None and missing() and (used := self._cache.nbytes().paged) != before:
            before = used
            self._cache.shed(missing())
            self._count_adapters()

    def _tell(self) -> None:
        for place, candidate in enumerate(self._waiting):
            candidate.tell(self._reason(place, candidate))

    def _reason(self, place: int, candidate: _Candidate) -> str:
        needed = show_size(candidate.size.needs(self._base, self._steps).total)
        if place:
            return f"waits for {needed} of memory, behind job {self._waiting[0].name}"
        missing = self.ledger.missing(self._wanted(candidate.name, candidate.size))
        holders = f"job {', '.join(self._jobs)} ends" if self._jobs else "an adapter is unloaded"
        return f"waits for {needed} of memory, {show_size(missing)} more than are free, until {holders}"


def _owner(job: str) -> str:
    """Name of a job in the ledger, where it stands beside the base and the pages."""
    return f"job {job}"


def _limit_of(config: EngineConfig, budget: int) -> int | None:
    """Bytes that are set for stored adapters, None where nothing is."""
    match read_memory(config.adapter_memory, "adapter_memory"):
        case float() as share:
            return int(share * budget)
        case limit:
            return limit


def device_capacity(device: torch.device) -> Capacity:
    """Bytes that a device has, and those that are free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total, free)
    return process_capacity()


def _listed(needs: JobNeeds) -> str:
    """Lists what bytes are needed for, most first."""
    parts = {**{account.value: n for account, n in needs.own.items()}, Account.WORKSPACES.value: needs.shared}
    return ", ".join(f"{name} {show_size(n)}" for name, n in sorted(parts.items(), key=lambda item: -item[1]))
