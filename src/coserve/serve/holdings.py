"""Holdings of each tenant in the engine's memory: pages, adapters and jobs, by their names."""

from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, Final

from coserve.serve.engine.link import EngineLink
from coserve.serve.store.records import Tenant
from coserve.serve.store.store import Store
from coserve.serve.store.tinker import as_adapter

_AT_ONCE: Final = 32  # names that are looked up in a second
_MOST: Final = 4096  # names that are remembered
_LONGEST_NAME: Final = 120
Owner = tuple[str | None, str]  # a tenant's id, None where all share it, and the name that people know


class TenantHoldings:
    """Owners of what the engine has in memory. For one event loop."""

    def __init__(self, store: Store, link: EngineLink) -> None:
        self._store, self._link = store, link
        self._owners: dict[str, Owner] = {}  # by the engine's names of adapters and jobs

    async def learn(self) -> None:
        """Looks up who owns what is not known yet, some names at a time."""
        if (stats := self._link.stats) is None:
            return
        held = stats.holdings
        unknown: list[tuple[str, Callable[[str], Awaitable[Owner | None]]]] = [
            *((name, self._of_adapter) for name in held.adapters if name not in self._owners),
            *((name, self._of_job) for name in held.jobs if name not in self._owners),
        ]
        for name, find in islice(unknown, _AT_ONCE):
            if (owner := await find(name)) is not None:
                self._owners[name] = owner
        while len(self._owners) > _MOST:
            del self._owners[next(iter(self._owners))]

    def of(self, tenant: Tenant) -> dict[str, Any]:
        """The tenant's pages, and the bytes of its adapters and jobs; what all tenants share counts as its
        own, and of others' the sums are told."""
        if (stats := self._link.stats) is None:
            return {}
        held, own = stats.holdings, tenant.id
        return {
            "pages": sum(n for scope, n in held.pages.items() if scope.partition("/")[0] == own),
            "adapters": self._own(own, held.adapters),
            "jobs": self._own(own, held.jobs),
        }

    def _own(self, tenant: str, nbytes: dict[str, int]) -> dict[str, Any]:
        named, others = list[tuple[str, str, int]](), 0
        for name, count in nbytes.items():
            owner, shown = self._owners.get(name, ("", ""))
            if owner in (tenant, None):
                named.append((name, shown, count))
            else:
                others += count
        return {
            "own": named[:_AT_ONCE],
            "more": sum(count for *_, count in named[_AT_ONCE:]),
            "others": others,
        }

    async def _of_adapter(self, key: str) -> Owner | None:
        if (found := await self._store.adapters.get(key)) is None:
            checkpoint = await self._store.tinker_checkpoints.get(key)
            found = None if checkpoint is None else as_adapter(checkpoint)
        return None if found is None else (found.tenant, found.name[:_LONGEST_NAME])

    async def _of_job(self, id: str) -> Owner | None:
        found = await self._store.jobs.of_any(id)
        return None if found is None else (found.tenant, (found.suffix or id)[:_LONGEST_NAME])
