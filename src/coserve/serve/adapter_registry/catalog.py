"""Catalog of models: resolves names for a tenant, and counts the requests that use each adapter."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time

from coserve.serve.errors import ApiError, not_found
from coserve.serve.store.records import Adapter, Tenant
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import SCHEME, as_adapter


@dataclass(frozen=True, slots=True)
class Model:
    """A model to request: the base (`adapter` None) or one version of an adapter."""

    name: str
    created: int
    adapter: Adapter | None = None
    folder: Path | None = None  # the adapter's

    @property
    def key(self) -> str | None:
        """Key of the adapter version in the engine."""
        return None if self.adapter is None else self.adapter.id


class Catalog:
    """Finds models by name, and defers an adapter's removal until its last answer has ended."""

    def __init__(self, base: str, created: int, store: Store) -> None:
        self.base = Model(base, created)
        self._store = store
        self._users: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.Event] = {}  # set when nobody uses the adapter any more

    async def find(self, tenant: Tenant, name: str) -> Model:
        """The tenant's model of this name, or the checkpoint at a `tinker://` path. Raises ApiError 404 for
        an unknown name, or one of another base."""
        if name == self.base.name:
            return self.base
        adapter = await self._named(tenant, name)
        if adapter is None or adapter.id in self._leaving:
            raise unknown_model(name)
        return self._model(adapter)

    async def list(self, tenant: Tenant) -> list[Model]:
        """The base, and the tenant's adapters of it."""
        adapters = await self._store.adapters.list(tenant.id, self.base.name)
        present = [adapter for adapter in adapters if adapter.id not in self._leaving]
        return [self.base, *map(self._model, present)]

    async def _named(self, tenant: Tenant, name: str) -> Adapter | None:
        if not name.startswith(SCHEME):
            return await self._store.adapters.find(tenant.id, name, self.base.name)
        checkpoint = await self._store.tinker_checkpoints.find(tenant.id, name, time())
        if checkpoint is None or checkpoint.base != self.base.name:
            return None
        return as_adapter(checkpoint)

    def _model(self, adapter: Adapter) -> Model:
        return Model(adapter.name, adapter.created, adapter, self._store.folder_of(adapter))

    @contextmanager
    def use(self, model: Model) -> Iterator[None]:
        """Context in which the model is not removed. Raises ApiError 404 if its removal has begun."""
        key = model.key
        if key is None:
            yield
            return
        if key in self._leaving:
            raise unknown_model(model.name)
        self._users[key] += 1
        try:
            yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                if key in self._leaving:
                    self._leaving[key].set()

    async def retire(self, key: str, timeout: float) -> bool:
        """Refuses new users of an adapter; returns True once the last has ended, or False after `timeout`
        seconds, when the adapter becomes available again.
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

    def forget(self, key: str) -> None:
        """Drops a removed adapter."""
        self._leaving.pop(key, None)


def unknown_model(name: str) -> ApiError:
    """The error for an unknown model name."""
    message = f"The model '{name}' does not exist or you do not have access to it."
    return not_found(message, param="model", code="model_not_found")
