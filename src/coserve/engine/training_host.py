"""One base as that which trains on it sees it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from coserve.adapters.bank import AdapterBank
from coserve.adapters.paging.stored import KnownVersion, Outline
from coserve.core.request import BASE
from coserve.engine.admission import Admission
from coserve.engine.aside import Aside, AtOnce
from coserve.errors import CoserveError
from coserve.executors.executor import CloseSession, DropAdapters, Executor, OpenSession
from coserve.model.base import Base
from coserve.schedule.scheduler import Scheduler

Left = Callable[[], None]
Opened = Callable[[KnownVersion | CoserveError], None]


class Openings:
    """Opens and closes the sessions of one base's jobs and clients on the device, and publishes the first
    version of each. Called between two steps.

    To draw the weights of an adapter of rank 128 and to allocate its moments takes 30 ms for a model of five
    million parameters and seconds for one of eight billion, so `aside` does it: at once, or on a thread of a
    server.
    """

    def __init__(self, executor: Executor, bank: AdapterBank, base_id: str = BASE) -> None:
        self.aside: Aside = AtOnce()
        self._executor, self._bank, self._base_id = executor, bank, base_id
        self._under_way: dict[str, list[Left]] = {}  # by job; with calls for its end where it was closed

    def open(self, command: OpenSession, opened: Opened) -> None:
        """Opens a session whose bytes are reserved. Then `opened` is called with its first version, which is
        published, or with the error; it is not where the session is closed meanwhile."""
        self._under_way[command.job] = []
        work = partial(self._executor.call, command)
        self.aside.do("opening the session", work, partial(self._end, command, opened))

    def close(self, job: str, left: Left) -> bool:
        """Closes a session if there is one; its published versions stay. True if nothing of it is left on the
        device. Otherwise it is being opened, and `left` is called once nothing is. Where this raises, nothing
        has changed."""
        if job in self._under_way:
            self._under_way[job].append(left)
            return False
        self._executor.call(CloseSession(job))
        return True

    def when_left(self, job: str, call: Left) -> None:
        """Calls `call` once nothing is left on the device of a session of this name that was closed, or
        now."""
        if calls := self._under_way.get(job):
            calls.append(call)
        else:
            call()

    def _end(self, command: OpenSession, opened: Opened, outcome: Outline | CoserveError) -> None:
        calls = self._under_way.pop(command.job)
        known: KnownVersion | CoserveError
        if isinstance(outcome, CoserveError):
            known = outcome
        else:
            known = KnownVersion(command.adapter, command.version, outcome, base=self._base_id)
        if not calls:
            if isinstance(known, KnownVersion):
                self._bank.publish(known)
            opened(known)
            return
        self._executor.call(CloseSession(command.job))
        if isinstance(known, KnownVersion):
            self._executor.call(DropAdapters((known.key,)))
        for call in calls:
            call()


@dataclass(frozen=True, slots=True)
class TrainingHost:
    """The parts of a host that its jobs and its training sessions use. `drive` steps the engine once, `lock`
    is the engine's, and `base_id` the base's."""

    executor: Executor
    base: Base
    bank: AdapterBank
    scheduler: Scheduler
    admission: Admission
    openings: Openings
    drive: Callable[[], bool]
    lock: AbstractContextManager[bool]
    base_id: str = BASE
