"""Bytes of an engine: the ledger of its device, and what adapters take of it.

The base, the pages and what a step needs have theirs for good. Jobs reserve theirs through
`engine.admission`; stored adapters have what is left, or what was set for them.
"""

from collections.abc import Callable
from typing import Final

import torch

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.cache import AdapterCache
from coserve.config import EngineConfig
from coserve.core.size import read_memory, show_size
from coserve.errors import ConfigError, OutOfMemory
from coserve.executors.executor import DeviceMemory, Executor, ReadMemory
from coserve.memory.budget import Capacity, budget_of, process_capacity
from coserve.memory.compiled import BUILT_BYTES, bound_compiled_shapes
from coserve.memory.ledger import Account, Bytes, Ledger
from coserve.memory.malloc import resident_bytes, return_freed_memory
from coserve.memory.measured import make_meter
from coserve.model.base import Base
from coserve.model.load import usable_device
from coserve.schedule.config import SchedulerConfig
from coserve.train.needs import step_bytes

_ADAPTERS: Final = "adapters"
_STORED: Final = "stored adapters"  # those that lie on disk, too
_LIBRARIES: Final = "libraries"


class EngineMemory:
    """The ledger of one engine. Everything happens between two steps."""

    def __init__(self, config: EngineConfig) -> None:
        """Made before the model is loaded: what is free then is what there is to be had. Raises ConfigError
        where the device cannot be used."""
        device = usable_device(config.device)
        bound_compiled_shapes()
        self.meter = make_meter(device)
        self.imports = resident_bytes()  # of the process so far: no budget counts it
        self.ledger = Ledger(budget_of(config.memory, device_capacity(device)))
        self._limit = _limit_of(config, self.ledger.budget)

    def open(self, executor: Executor, base: Base, cache: AdapterCache, config: SchedulerConfig) -> None:
        """Enters what is there for good. Raises ConfigError where that is more than the budget."""
        self._executor, self._base, self._cache = executor, base, cache
        weights, pages = self.held().base, executor.spec.cache_nbytes
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

    # Adapters

    def load(self, adapter: AdapterVersion) -> None:
        """Makes sure that there is room for a version that is to be published. Raises OutOfMemory."""

        def short() -> int:
            held = self.ledger.of(_ADAPTERS)
            return self.ledger.missing({_ADAPTERS: {Account.ADAPTERS: held + adapter.nbytes}})

        if missing := self.make_room(short):
            raise OutOfMemory(
                f"the adapter {adapter.name!r} needs {show_size(adapter.nbytes)}, {show_size(missing)} more "
                "than are free: unload others, let jobs end, or raise engine.memory"
            )

    def stored_room(self) -> int:
        """Bytes that stored adapters in memory may have together: what was set, or what nobody else has."""
        if self._limit is not None:
            return self._limit
        self.count_adapters()
        return self.ledger.free + self.ledger.of(_STORED)

    def fit(self, name: str, cost: int) -> None:
        """Raises OutOfMemory for a stored adapter that would never fit, if it were alone."""
        most = self.job_room() if self._limit is None else self._limit
        if cost > most:
            raise OutOfMemory(
                f"the adapter {name!r} needs {show_size(cost)} of memory, {show_size(cost - most)} more than "
                "adapters may have: raise engine.adapter_memory or engine.memory"
            )

    # What there is

    def audit(self) -> dict[Account, int]:
        """Charges what is held in fact; bytes by account then."""
        held = self.held()
        self.count_adapters()
        self.ledger.charge("base", Account.BASE, held.base)
        for job, accounts in held.sessions.items():
            for account, nbytes in accounts.items():
                self.ledger.charge(job_owner(job), account, nbytes)
        if self.ledger.of(_LIBRARIES) and resident_bytes() > self.imports + self.ledger.budget:
            return_freed_memory()
        return self.ledger.accounts()

    def job_room(self) -> int:
        """Bytes that a job could have if it were alone, with no adapter loaded."""
        fixed, held = sum(map(self.ledger.of, ("pages", "steps", _LIBRARIES))), self.held()
        return self.ledger.budget - fixed - (self._limit or 0) - held.base - held.base_to_train

    def held(self) -> DeviceMemory:
        """Bytes that the device holds in fact."""
        return self._executor.call(ReadMemory())

    def count_adapters(self) -> None:
        """Versions that no job counts as its own: loaded ones, finished ones, and those that answers hold."""
        held = self.held()
        nbytes = self._cache.nbytes(held.slots)
        own = sum(accounts[Account.ADAPTERS] for accounts in held.sessions.values())
        self.ledger.charge(_STORED, Account.ADAPTERS, nbytes.paged)
        self.ledger.charge(_ADAPTERS, Account.ADAPTERS, nbytes.resident - own)

    def make_room(self, missing: Callable[[], int]) -> int:
        """Has stored adapters that nobody uses leave, if that is enough for the `missing` bytes; returns what
        is missing then. What was set for them is theirs.

        The slot of one that left may stay for the next one: then more have to leave.
        """
        self.count_adapters()
        before = -1
        while self._limit is None and missing() and (used := self._cache.nbytes().paged) != before:
            before = used
            self._cache.shed(missing())
            self.count_adapters()
        return missing()


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


def job_owner(job: str) -> str:
    """Name of a job in the ledger, where it stands beside the base and the pages."""
    return f"job {job}"
