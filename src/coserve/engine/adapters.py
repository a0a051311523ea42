"""The adapters of one engine: `Engine.adapters`."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from coserve.adapters.adapter import AdapterVersion
from coserve.adapters.bank import AdapterBank, check_base, check_name
from coserve.adapters.bypass import Bypasses
from coserve.adapters.files import read_adapter, write_adapter
from coserve.adapters.paging.cache import AdapterCache, AdapterTier
from coserve.adapters.paging.reader import Reader
from coserve.adapters.paging.stored import KnownVersion, Outlines, StoredVersion
from coserve.core.plan import Updated
from coserve.core.request import BASE
from coserve.engine.memory import EngineMemory
from coserve.engine.paged import PagedAdapters
from coserve.errors import AdapterError
from coserve.executors.executor import DropAdapters, Executor, FetchAdapter, LoadAdapter, ReadAdapter
from coserve.model.base import Base
from coserve.schedule.open_requests import OpenRequests


class SharedAdapters:
    """The adapters of all bases of an engine: `bank` has the current version of each name, `cache` the tier
    and users of each version, `paged` the requests that wait for one, `reader` the reads of weights."""

    def __init__(
        self,
        requests: OpenRequests,
        room: Callable[[], int],
        host_room: int,
        pause_training: Callable[[], object],
    ) -> None:
        """`room` gives the bytes that adapters read from files can have, `host_room` is that of their host
        copies. `pause_training` is called once an adapter is read."""
        self._executors: dict[str, Executor] = {}  # by base
        self.reader = Reader(self._read, pause_training)
        self.cache = AdapterCache(self.reader.begin, self.drop, room, host_room)
        self.bank = AdapterBank(self.cache)
        self.paged = PagedAdapters(self.cache, requests, self.reader)

    def add_base(self, base: str, executor: Executor) -> None:
        """Takes adapters for a base from now on."""
        self._executors[base] = executor

    def drop(self, key: str, tier: AdapterTier) -> None:
        """Frees a version's copy in a tier."""
        for executor in self._executors.values():  # those of other bases know no such key
            executor.call(DropAdapters((key,), tier))

    def _read(self, stored: StoredVersion) -> int:
        """Loads a stored version onto the device; returns its bytes there. Runs on the reader's thread."""
        return self._executors[stored.base].call(ReadAdapter(stored)).nbytes


class EngineAdapters:
    """Publishes, loads, pins, saves and removes the adapters of one base of an engine. What bases share is in
    `shared`; `bank`, `cache`, `paged` and `reader` are its own.

    Callers of `publish` hold `lock`, the engine's; the other methods take it where they need it, so steps go
    on while files are read.
    """

    def __init__(
        self,
        shared: SharedAdapters,
        executor: Executor,
        base: Base,
        memory: EngineMemory,
        slot_nbytes: Callable[[Bypasses], int],
        refuse_while_trained: Callable[[str], None],
        removed: Callable[[], None],
        lock: AbstractContextManager[bool],
        base_id: str = BASE,
    ) -> None:
        """`slot_nbytes` gives the bytes of an adapter's slot. `refuse_while_trained` raises JobError for the
        name of an adapter in training; `removed` is called once an adapter's bytes may be free."""
        self._executor, self._base, self._memory, self._lock = executor, base, memory, lock
        self._refuse_while_trained, self._removed = refuse_while_trained, removed
        self._outlines = Outlines(base, base.dtype, slot_nbytes)
        self._base_id, self.shared = base_id, shared
        self.bank, self.cache, self.paged, self.reader = (
            shared.bank, shared.cache, shared.paged, shared.reader
        )  # fmt: skip

    def open(self) -> None:
        """Takes adapters for the base from now on."""
        self.shared.add_base(self._base_id, self._executor)

    def look(self, name: str) -> KnownVersion:
        """The current version of a name, or the version of a key. Raises AdapterNotFound, and AdapterError
        for an adapter of another base."""
        known = self.bank.look(name)
        check_base(known, self._base_id)
        return known

    # In memory

    def load(self, name: str, folder: str | Path) -> AdapterVersion:
        """Loads the adapter in `folder`, in PEFT's format and of any method, and publishes it under `name`;
        it stays in memory. Raises AdapterError, JobError or OutOfMemory."""
        base = self._base
        return self.add(read_adapter(folder, name, base, base.dtype, base.device))

    def add(self, adapter: AdapterVersion) -> AdapterVersion:
        """Publishes an adapter under its name, and keeps it in memory; returns it with its version number.
        Raises AdapterError, JobError or OutOfMemory."""
        with self._lock:
            check_name(adapter.name)  # before the weights are on the device
            self._refuse_while_trained(adapter.name)
            adapter = replace(adapter, version=self.bank.next_version(adapter.name, self._base_id))
            self._memory.load(adapter)
            outline = self._executor.call(LoadAdapter(adapter))
            self.bank.publish(KnownVersion(adapter.name, adapter.version, outline, base=self._base_id))
            return adapter

    # On disk

    def register(self, name: str, folder: str | Path) -> StoredVersion:
        """Publishes the adapter in `folder` under `name`; its weights stay on disk until a request needs
        them, and may be evicted again. So the folder has to stay as it is. Raises AdapterError, JobError or
        OutOfMemory."""
        return self.add_stored(self.look_at(name, folder))

    def look_at(self, name: str, folder: str | Path, new: bool = False) -> StoredVersion:
        """Reads the outline of the adapter in `folder`, for `add_stored`. The weights of a `new` one are
        checked, and not kept. Takes no lock. Raises AdapterError if the adapter does not fit this base."""
        return self._outlines.look(name, folder, new)

    def add_stored(self, stored: StoredVersion) -> StoredVersion:
        """Publishes an adapter on disk under its name; returns it with its version number. Raises
        AdapterError, JobError, or OutOfMemory if it would never fit."""
        with self._lock:
            self._refuse_while_trained(stored.name)
            self._memory.fit(stored.name, stored.cost)
            version = self.bank.next_version(stored.name, self._base_id)
            stored = replace(stored, version=version, base=self._base_id)
            self.bank.publish(stored)
            return stored

    def pin(self, name: str, pinned: bool = True) -> None:
        """Loads a registered adapter and keeps it in memory, or unpins it. Raises AdapterNotFound."""
        with self._lock:
            self.paged.pin(self.bank.look(name).key, pinned)

    # Both

    def unload(self, name: str) -> None:
        """Removes an adapter; answers under way keep it until they end. Raises AdapterNotFound, or JobError
        while it is trained."""
        with self._lock:
            self._refuse_while_trained(name)
            self.bank.remove(name)
            self._removed()

    def weights(self, name: str) -> AdapterVersion:
        """An adapter's current version, or the version of a given key, with its weights, read from files if
        they are not on the device. Raises AdapterNotFound."""
        with self._lock:
            known = self.look(name)
            if isinstance(known, StoredVersion) and self.cache.tier(known.key) is not AdapterTier.DEVICE:
                return known.read(self._base, self._base.dtype, self._base.device)
            return self._executor.call(FetchAdapter(known.key))

    def save(self, name: str, folder: str | Path) -> None:
        """Writes the adapter's current version in PEFT's format. Raises AdapterNotFound or AdapterError."""
        with self._lock:
            try:
                config = self._base.model.config
                write_adapter(self.weights(name), folder, str(config.name_or_path), config.model_type)
            except OSError as error:
                raise AdapterError(f"the adapter cannot be written to {folder}: {error.strerror}") from error

    def publish(self, updates: Iterable[Updated]) -> None:
        """Publishes the versions of a step's optimizer steps, each with the outline of the one before."""
        for updated in updates:
            name, _, number = updated.version.rpartition("@")
            if name not in self.bank:  # removed while the plan was under way
                self.shared.drop(updated.version, AdapterTier.DEVICE)
                continue
            before = self.bank.look(name)
            self.bank.publish(KnownVersion(name, int(number), before.outline, base=before.base))
