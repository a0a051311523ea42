"""One base as that which trains on it sees it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from coserve.adapters.bank import AdapterBank
from coserve.core.request import BASE
from coserve.engine.admission import Admission
from coserve.engine.openings import Openings
from coserve.executors.executor import Executor
from coserve.model.base import Base
from coserve.schedule.scheduler import Scheduler


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
