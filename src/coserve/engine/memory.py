"""Memory of an engine: the ledger of its device, and the share of adapters.

The base, the pages and a step's workspace are reserved for good. Jobs reserve through `engine.admission`;
stored adapters have a set limit, or the rest. Bases of one engine share the ledger.
"""

from collections.abc import Callable, Iterable
from typing import Final

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.paging.cache import AdapterCache
from coserve.config import EngineConfig
from coserve.core.request import BASE
from coserve.core.size import show_size
from coserve.engine.base_memory import Fixed, adapter_limit
from coserve.errors import ConfigError, OutOfMemory
from coserve.executors.executor import DeviceMemory, Executor, ReadMemory, SetLimits
from coserve.memory.budget import budget_of
from coserve.memory.compiled import bound_compiled_shapes, built_bytes
from coserve.memory.ledger import Account, Bytes, Ledger
from coserve.memory.malloc import resident_bytes, return_freed_memory
from coserve.memory.measured import device_capacity, make_meter
from coserve.model.base import Base
from coserve.model.load import usable_device
from coserve.schedule.config import SchedulerConfig

JOB_OWNER: Final = "job "  # before a job's id, in the ledger's names of owners
_FIXED: Final = ("base", "pages", "steps")
_ADAPTERS: Final = "adapters"
_STORED: Final = "stored adapters"  # including those on disk
_LIBRARIES: Final = "libraries"
_GRAPHS: Final = "graphs"  # of passes and of training, and the stores of the latter
# Bytes by which a process beyond its budget grows before a step returns freed memory again. Returning takes
# 0.2 to 0.4 ms a MiB; without this bound every step would try it in vain.
_REGROWN: Final = 8 << 20


class DeviceBudget:
    """The bytes of a device as all bases of an engine have them in common: the ledger, and what each base
    holds (`bases`, those that are loaded)."""

    def __init__(self, config: EngineConfig) -> None:
        """It must be made before a model is loaded: the bytes free then are the capacity. Raises ConfigError
        where the device cannot be used."""
        device = usable_device(config.device)
        bound_compiled_shapes()
        self.bases: list[EngineMemory] = []
        self.meter = make_meter(device)
        self.imports = resident_bytes()  # which no budget counts
        # Ranks on a CPU share its memory: the ledger is that of one of them.
        sharing = config.ranks if device.type == "cpu" else 1
        self.ledger = Ledger(budget_of(config.memory, device_capacity(device)) // sharing)


class EngineMemory:
    """The bytes of one base in the ledger of its engine. All methods run between two steps."""

    def __init__(self, config: EngineConfig, budget: DeviceBudget, base_id: str = BASE) -> None:
        self.base_id, self.budget = base_id, budget
        self.meter, self.imports, self.ledger = budget.meter, budget.imports, budget.ledger
        self._limit = adapter_limit(config, self.ledger.budget)
        self._returned = 0  # resident bytes after freed memory was last returned

    def open(self, executor: Executor, base: Base, cache: AdapterCache, config: SchedulerConfig) -> None:
        """Enters the base, the pages and the workspace. Raises ConfigError where they exceed the budget."""
        self._executor, self._base, self._cache = executor, base, cache
        weights, own = self._held().base, Fixed.of(executor, base, config)
        pages, workspace = own.pages, own.workspace
        fixed: dict[str, Bytes] = {
            base_owner("base", self.base_id): {Account.BASE: weights},
            base_owner("pages", self.base_id): {Account.PAGES: pages},
            base_owner("steps", self.base_id): {Account.WORKSPACES: workspace},
        }
        if missing := self.ledger.missing(fixed):
            raise ConfigError(
                f"engine.memory: {show_size(self.ledger.budget)} are {show_size(missing)} too few for "
                f"{'the' if self.base_id == BASE else 'one more'} "
                f"model ({show_size(weights)}), the cache ({show_size(pages)}; engine.cache_tokens) and a "
                f"step ({show_size(workspace)}): set it to {show_size(self.ledger.budget + missing, up=True)}"
            )
        self.ledger.reserve(fixed)
        self.budget.bases.append(self)
        if self._limit is not None and self.base_id == BASE:
            asked = {_STORED: {Account.ADAPTERS: self._limit}}
            if missing := self.ledger.missing(asked):
                raise ConfigError(
                    f"engine.adapter_memory: {show_size(self._limit)} are {show_size(missing)} more than "
                    f"engine.memory ({show_size(self.ledger.budget)}) leaves beside model, cache and a step"
                )
            self.ledger.reserve(asked)

    def count_process(self, grown: int | None = None) -> None:
        """Counts bytes that libraries took and will take beside the model, in a process of the engine's own.

        From then on the process's bytes beyond its imports stay within the budget: freed memory is returned
        to the system where needed. Nothing is counted on a GPU. `grown` is the bytes that loading took beside
        the model where they cannot be measured in this process. Raises ConfigError where there is no room.
        """
        if self._base.device.type != "cpu":
            return
        loaded = sum(one._executor.spec.grown for one in self.budget.bases)
        nbytes = (loaded if grown is None else grown) + built_bytes()
        wanted = {_LIBRARIES: {Account.LIBRARIES: nbytes}}
        if missing := self.ledger.missing(wanted):
            raise ConfigError(
                f"engine.memory: {show_size(self.ledger.budget)} are {show_size(missing)} too few beside "
                f"model, cache and a step for what libraries take in this process ({show_size(nbytes)}): set "
                f"it to {show_size(self.ledger.budget + missing, up=True)}"
            )
        self.ledger.reserve(wanted)

    # Adapters

    def load(self, adapter: AdapterVersion) -> None:
        """Raises OutOfMemory where there is no room for a version to be published."""

        def short() -> int:
            held = self.ledger.of(_ADAPTERS)
            return self.ledger.missing({_ADAPTERS: {Account.ADAPTERS: held + adapter.nbytes}})

        if missing := self.make_room(short):
            raise OutOfMemory(
                f"the adapter {adapter.name!r} needs {show_size(adapter.nbytes)}, {show_size(missing)} more "
                "than are free: unload others, let jobs end, or raise engine.memory"
            )

    def stored_room(self, asks: bool = True) -> int:
        """Bytes that all stored adapters may take in memory: the set limit, or all that is free, as the
        device has it now or, unless it `asks`, had it last time."""
        if self._limit is not None:
            return self._limit
        if asks:
            self.count_adapters()
        return self.ledger.free + self.ledger.of(_STORED)

    def fit(self, name: str, cost: int) -> None:
        """Raises OutOfMemory for a stored adapter that would not fit even alone."""
        most = self.job_room() if self._limit is None else self._limit
        if cost > most:
            raise OutOfMemory(
                f"the adapter {name!r} needs {show_size(cost)} of memory, {show_size(cost - most)} more than "
                "adapters may have: raise engine.adapter_memory or engine.memory"
            )

    # State

    @property
    def recurrent_bases(self) -> frozenset[str]:
        """Ids of the bases with recurrent layers, which have a state for each sequence."""
        return frozenset(one.base_id for one in self.budget.bases if one._base.is_recurrent)

    def audit(self) -> dict[Account, int]:
        """Charges the bytes that the device holds, of all bases; returns bytes by account."""
        self.count_adapters()
        for one in self.budget.bases:
            held = one._held()
            self.ledger.charge(base_owner("base", one.base_id), Account.BASE, held.base)
            for job, accounts in held.sessions.items():
                for account, nbytes in accounts.items():
                    self.ledger.charge(job_owner(job), account, nbytes)
        self._returned = 0
        self.return_excess()
        return self.ledger.accounts()

    def return_excess(self) -> None:
        """Returns freed memory to the system where the process holds more than its imports and the budget,
        and `_REGROWN` bytes more than the last return left. Does nothing before `count_process`."""
        most = max(self.imports + self.ledger.budget, self._returned + _REGROWN)
        if self.ledger.of(_LIBRARIES) and resident_bytes() > most:
            return_freed_memory()
            self._returned = resident_bytes()

    def free_now(self) -> int:
        """Bytes without an owner, without asking the device. Stored adapters that are being read count as
        owners."""
        read = self._cache.nbytes().paged - self.ledger.of(_STORED)
        return max(self.ledger.free - max(read, 0), 0)

    def job_room(self) -> int:
        """Bytes available to a job that runs alone with no adapter loaded."""
        return self.ledger.budget - sum(self.beside_jobs().values())

    def beside_jobs(self) -> dict[str, int]:
        """Bytes that no job can have, by what has them: the base, with what its backward unpacks."""
        held, others = self._held(), [one.base_id for one in self.budget.bases if one is not self]

        def of(name: str, bases: Iterable[str] = (self.base_id,)) -> int:
            return sum(self.ledger.of(base_owner(name, base)) for base in bases)

        return {
            "the base": held.base,
            "its weights unpacked for backward": held.base_backward,
            "the cache": of("pages"),
            "a step": of("steps"),
            "other bases": sum(of(name, others) for name in _FIXED),
            "libraries": self.ledger.of(_LIBRARIES),
            "adapters": self._limit or 0,
        }

    def _held(self) -> DeviceMemory:
        """Bytes that the device really holds."""
        return self._executor.call(ReadMemory())

    def count_adapters(self) -> None:
        """Counts versions outside of jobs' reservations: loaded ones, finished ones, and those that answers
        hold, of all bases."""
        held = [one._held() for one in self.budget.bases]
        nbytes = self._cache.nbytes(sum(each.slots for each in held))
        own = sum(accounts[Account.ADAPTERS] for each in held for accounts in each.sessions.values())
        self.ledger.charge(_GRAPHS, Account.WORKSPACES, sum(each.graphs for each in held))
        self.ledger.charge(_STORED, Account.ADAPTERS, nbytes.paged)
        # A session that was just opened holds a version that is not published yet.
        self.ledger.charge(_ADAPTERS, Account.ADAPTERS, max(nbytes.resident - own, 0))

    def graph_room(self) -> int:
        """Bytes that the base's stores of graphs may have: what they have, and all that is free."""
        self.count_adapters()
        return self._held().graph_stores + max(self.ledger.free, 0)

    def _shed_graphs(self, wanted: int) -> None:
        """Has stores of graphs dropped that free so many bytes, of one base after the other."""
        for one in self.budget.bases:
            held = one._held().graph_stores
            if wanted > 0 and held:
                one._executor.call(SetLimits(graph_store_nbytes=max(held - wanted, 0)))
                wanted -= held - one._held().graph_stores
        self.count_adapters()

    def make_room(self, missing: Callable[[], int]) -> int:
        """Drops stores of graphs, then evicts unused stored adapters, if that frees the `missing` bytes;
        returns the bytes still missing. Evicts no adapter where stored ones have a limit of their own.

        An evicted adapter's slot may stay allocated for the next one; then more are evicted.
        """
        self.count_adapters()
        if wanted := missing():
            self._shed_graphs(wanted)
        before = -1
        while self._limit is None and missing() and (used := self._cache.nbytes().paged) != before:
            before = used
            self._cache.shed(missing())
            self.count_adapters()
        return missing()


def base_owner(name: str, base_id: str) -> str:
    """Name in the ledger of what each base has one of."""
    return name if base_id == BASE else f"{name} of {base_id}"


def job_owner(job: str) -> str:
    """A job's owner name in the ledger."""
    return f"{JOB_OWNER}{job}"
