"""Follows what other servers on the same artifacts and database do: pins, copies nobody needs, leftovers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from coserve.errors import CoserveError
from coserve.serve.artifacts.shared import SharedArtifacts
from coserve.serve.state import State
from coserve.serve.store.records import Adapter
from coserve.serve.tasks import cancel

log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 1.0  # between two looks for pins of others
SWEEP_SECONDS: Final = 3600.0  # between two looks for objects without a row
AGAIN_SECONDS: Final = 10.0  # before the next attempt, where the artifact store is away


@asynccontextmanager
async def following(state: State, artifacts: SharedArtifacts) -> AsyncIterator[None]:
    """Context in which this server's engine follows pins that others make, copies of artifacts leave the
    state folder where they exceed their bound, and the artifact store loses what no row names."""

    async def may_leave(name: str) -> bool:
        part, key, *_ = name.split("/")
        if part == "jobs":
            return not state.job_controller.trains(key)
        if part == "batches":
            return False  # one that has ended has no copy
        if part not in ("adapters", "tinker"):
            return True
        stats = state.link.stats
        if state.catalog.uses(key) or (stats is not None and key in stats.paging.pinned):
            return False
        await state.link.unload(key)
        return not state.catalog.uses(key)

    artifacts.may_leave = may_leave
    tasks = [asyncio.create_task(_follow_pins(state)), asyncio.create_task(_sweep(state, artifacts))]
    try:
        yield
    finally:
        await cancel(*tasks)
        await artifacts.settled()


async def _follow_pins(state: State) -> None:
    """Has the engine pin what the database says, once the two have differed in the same way twice: a request
    that pins changes one after the other."""
    last: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            wanted = await _pinned(state)
            stats = state.link.stats
            held = frozenset(wanted) if stats is None else frozenset(stats.paging.pinned)
            differing = held ^ wanted.keys()
            for key in differing & last:
                await _follow_pin(state, key, wanted.get(key))
            last = differing
        except CoserveError as error:  # the database is away, or too much is pinned for this engine
            log.warning("a pin of another server is not followed: %s", error)


async def _pinned(state: State) -> Mapping[str, Adapter]:
    """Pinned adapters, by key."""
    return {
        adapter.id: adapter
        for base in state.catalog.bases.values()
        for adapter in await state.store.adapters.pinned(base.name)
    }


async def _follow_pin(state: State, key: str, wanted: Adapter | None) -> None:
    adapter = await state.store.adapters.get(key) if wanted is None else wanted
    if adapter is None:
        await state.link.unload(key)  # deleted
        return
    base = state.settings.base_id(adapter.base)
    await state.link.pin(key, state.store.folder_of(adapter), wanted is not None, base)


async def _sweep(state: State, artifacts: SharedArtifacts) -> None:
    """Puts what an earlier start without a store has left, and deletes leftovers of servers that ended."""
    is_adopted = False
    while True:
        try:
            if not is_adopted:
                await artifacts.adopt()
                is_adopted = True
            for part, known in (await state.store.named_artifacts()).items():
                await artifacts.sweep(part, known, state.store.clock())
            pause = SWEEP_SECONDS
        except CoserveError as error:
            log.warning("artifacts are looked through later: %s", error)
            pause = AGAIN_SECONDS
        await asyncio.sleep(pause)
