"""Catalog of models: resolves names for a tenant, and counts the requests that use each adapter."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coserve.core.request import BASE
from coserve.serve.errors import ApiError, not_found
from coserve.serve.store.records import Adapter, Tenant, TinkerCheckpoint
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import SCHEME, as_adapter

_MOST_REMOVED: Final = 4096  # removed adapters that are remembered
_MOST_NAMED: Final = 4096  # adapters whose names are remembered
EXACT: Final = "exact"  # the chain of an answer without an approximation


@dataclass(frozen=True, slots=True)
class ApproximateModel:
    """An approximation of a model, which no request names: the adapter version `key` in `folder`, without a
    folder the chain of two bases that the engine has under that id, and without a key the base."""

    name: str
    key: str | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model to request: a base (`adapter` None) or one version of an adapter. `chains` may answer in its
    place where a request allows it, the most accurate first. `base` is the base's name, and `base_id` what
    the engine calls it."""

    name: str
    created: int
    base: str
    base_id: str = BASE
    adapter: Adapter | None = None
    folder: Path | None = None  # the adapter's
    chains: tuple[ApproximateModel, ...] = ()

    @property
    def key(self) -> str | None:
        """Key of the adapter version in the engine."""
        return None if self.adapter is None else self.adapter.id

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the adapter and of the chains that are one, by key."""
        known = ((self.key, self.folder), *((chain.key, chain.folder) for chain in self.chains))
        return {key: folder for key, folder in known if key is not None and folder is not None}


class Catalog:
    """Finds models by name, and defers an adapter's removal until its last answer has ended."""

    def __init__(self, base: str, created: int, store: Store, further: Iterable[str] = ()) -> None:
        """`further` are the names of the bases beside the first."""
        self.base = Model(base, created, base)
        others = {name: Model(name, created, name, name) for name in further}
        self.bases: dict[str, Model] = {base: self.base, **others}
        self.chains: dict[str, tuple[ApproximateModel, ...]] = {}  # by the adapter's key, or the base's name
        self.aliases: Mapping[str, str] = {}  # of bases, by names or beginnings of names that end in *
        self._store = store
        self._users: Counter[str] = Counter()
        self._names: dict[str, str] = {}  # of adapters by key, the least recently used first
        self._leaving: dict[str, asyncio.Event] = {}  # by key; set when no request uses the adapter
        self._removed: dict[str, None] = {}  # keys, the oldest first

    async def find(self, tenant: Tenant, name: str) -> Model:
        """The tenant's model of this name, or the checkpoint at a `tinker://` path. Raises ApiError 404 for
        an unknown name, or one of another base. Raises ApiError 400 for an approximation, which can be
        neither requested nor trained on."""
        if (base := self.bases.get(name)) is not None:
            return replace(base, chains=self.chains.get(name, ()))
        adapter = await self._named(tenant, name)
        if adapter is None and any(name == each.name for own in self.chains.values() for each in own):
            raise _approximate_model(name)
        if adapter is None and (alias := self.alias_of(name)) is not None:
            return await self.find(tenant, alias)
        if adapter is None or adapter.id in self._leaving:
            raise unknown_model(name)
        return self.model_of(adapter)

    def alias_of(self, name: str) -> str | None:
        """The base that the settings have stand in for a model of this name; None for no such name."""
        if (exact := self.aliases.get(name)) is not None:
            return exact
        longest = [each for each in self.aliases if each.endswith("*") and name.startswith(each[:-1])]
        return self.aliases[max(longest, key=len)] if longest and name not in self.bases else None

    def checkpoint(self, row: TinkerCheckpoint) -> Model:
        """A checkpoint of a `tinker` client as a model."""
        return self.model_of(as_adapter(row))

    async def list(self, tenant: Tenant) -> list[Model]:
        """The bases, and the tenant's adapters of them."""
        adapters = [one for base in self.bases for one in await self._store.adapters.list(tenant.id, base)]
        present = [adapter for adapter in adapters if adapter.id not in self._leaving]
        return [*self.bases.values(), *map(self.model_of, present)]

    async def _named(self, tenant: Tenant, name: str) -> Adapter | None:
        if not name.startswith(SCHEME):
            for base in self.bases:
                if (found := await self._store.adapters.find(tenant.id, name, base)) is not None:
                    return found
            for base in self.bases:
                if (found := await self._store.permissions.permitted(tenant.id, name, base)) is not None:
                    return found
            return None
        checkpoint = await self._store.tinker_checkpoints.find(tenant.id, name, self._store.clock())
        if checkpoint is None or checkpoint.base not in self.bases:
            return None
        return as_adapter(checkpoint)

    def users_of(self, key: str) -> int:
        """Number of answers and sessions that use an adapter now."""
        return self._users[key]

    def model_of(self, adapter: Adapter) -> Model:
        """An adapter of the store as a model."""
        chains = self.chains.get(adapter.id, ())
        base = self.bases.get(adapter.base, self.base)
        folder = self._store.folder_of(adapter)
        return Model(adapter.name, adapter.created, base.name, base.base_id, adapter, folder, chains)

    @contextmanager
    def use(self, model: Model) -> Iterator[None]:
        """Context in which the model is not removed. Raises ApiError 404 if its removal has begun, or is over
        since the model was found."""
        key = model.key
        if key is None:
            yield
            return
        if key in self._leaving or key in self._removed:
            raise unknown_model(model.name)
        self._users[key] += 1
        self._names.pop(key, None)
        self._names[key] = model.name
        while len(self._names) > _MOST_NAMED and (old := next(iter(self._names))) not in self._users:
            del self._names[old]
        try:
            yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                if key in self._leaving:
                    self._leaving[key].set()

    def uses(self, key: str) -> bool:
        """Tells whether requests use an adapter now."""
        return self._users[key] > 0

    @property
    def used(self) -> Mapping[str, str]:
        """Names of the adapters that requests use now, by key."""
        return {key: self._names[key] for key in self._users}

    def name_of(self, key: str) -> str | None:
        """The name by which an adapter was used last; None for one that was not used lately."""
        return self._names.get(key)

    async def retire(self, key: str, timeout: float | None) -> bool:
        """Refuses new users of an adapter; returns True once the last has ended, or False after `timeout`
        seconds (None: never), when the adapter becomes available again.
        """
        if key in self._leaving:
            raise ApiError(409, "The adapter is being unloaded already.", code="adapter_leaving")
        idle = self._leaving[key] = asyncio.Event()
        if not self._users[key]:
            idle.set()
        try:
            await asyncio.wait_for(idle.wait(), timeout)
        except TimeoutError:
            del self._leaving[key]
            return False
        except asyncio.CancelledError:
            del self._leaving[key]
            raise
        return True

    def removed(self, key: str) -> None:
        """Notes that an adapter has been removed, so that a request that found it before is refused when it
        uses it."""
        self._removed[key] = None
        while len(self._removed) > _MOST_REMOVED:
            del self._removed[next(iter(self._removed))]

    def forget(self, key: str) -> None:
        """Ends an adapter's removal, successful or not."""
        self._leaving.pop(key, None)


def _approximate_model(name: str) -> ApiError:
    message = (
        f"'{name}' is an approximate chain, and no model of its own: name the model that it approximates. An "
        "answer takes it only where the request says 'adaptive', and training never."
    )
    return ApiError(400, message, param="model", code="approximate_chain")


def unknown_model(name: str) -> ApiError:
    """The error for an unknown model name."""
    message = f"The model '{name}' does not exist or you do not have access to it."
    return not_found(message, param="model", code="model_not_found")
