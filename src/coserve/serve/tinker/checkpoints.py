"""Checkpoints as files and rows: reading, copying and deleting them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from coserve.errors import StateError
from coserve.serve.errors import ApiError, not_found
from coserve.serve.state import State
from coserve.serve.store.durable import link_files, settle
from coserve.serve.store.ids import new_id
from coserve.serve.store.quotas import bytes_in
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSession
from coserve.serve.tinker.schema import CopyWeightsRequest
from coserve.serve.tinker.sessions import ClientSessions

R = TypeVar("R")
MOST_TEMPORARY: Final = 16  # unnamed checkpoints of one run, for samplers
_MOMENT: Final = 0.05  # seconds
_AGAIN: Final = 0.5  # seconds until the next attempt while the database or the artifact store is away
_DISCARDING: Final[set["asyncio.Task[None]"]] = set()  # of tasks: the loop alone would not keep them


async def insistently(work: Callable[[], Awaitable[R]], patience: float) -> R:
    """Does work, again for `patience` seconds while the database or the artifact store is away: its client
    has a promise, and does not ask for it again. Raises StateError after that."""
    end = time.monotonic() + patience
    while True:
        try:
            return await work()
        except StateError:
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(_AGAIN)


async def readable_checkpoint(state: State, tenant: Tenant, path: str) -> TinkerCheckpoint:
    """The checkpoint at a `tinker://` path that a tenant may read. Raises ApiError 404."""
    found = await state.store.tinker_checkpoints.find(tenant.id, path, state.store.clock())
    if found is None:
        raise not_found(f"There is no checkpoint '{path}', or you may not read it.", param="path")
    return found


@asynccontextmanager
async def in_use(state: State, tenant: Tenant, path: str) -> AsyncIterator[TinkerCheckpoint]:
    """Context with the checkpoint at a path that the tenant may read, whose files stay until it ends. Raises
    ApiError 404, also for one whose deletion has begun."""
    found = await readable_checkpoint(state, tenant, path)
    with state.catalog.use(state.catalog.checkpoint(found)):
        await state.store.artifacts.get(state.store.folder / found.path)
        yield found


async def delete_checkpoint(state: State, row: TinkerCheckpoint, patience: float | None = None) -> None:
    """Deletes a checkpoint once nobody uses it; jobs and runs have files of their own. Raises ApiError 400
    where answers that use it go on for longer than `patience` seconds, by default the server's own."""
    if not await state.catalog.retire(row.id, state.settings.drain_seconds if patience is None else patience):
        # No 409: clients would send it again for minutes.
        raise ApiError(400, f"Answers that use {row.tinker_path} are still under way.", code="adapter_in_use")
    try:
        await state.link.unload(row.id)
        await state.store.tinker_checkpoints.remove(row.id)
        state.catalog.removed(row.id)
    finally:
        state.catalog.forget(row.id)


async def delete_unused(state: State, rows: Sequence[TinkerCheckpoint]) -> None:
    """Deletes checkpoints, but for those in use."""
    for row in rows:
        with suppress(ApiError):
            await delete_checkpoint(state, row, _MOMENT)


async def trim_temporary(state: State, session: str, run: str) -> None:
    """Deletes a run's oldest temporary checkpoints beyond `MOST_TEMPORARY`, but for those in use."""
    own = [row for row in await state.store.tinker_checkpoints.temporary(session) if row.run == run]
    await delete_unused(state, own[:-MOST_TEMPORARY])


async def copy_checkpoint(
    sessions: ClientSessions, tenant: Tenant, body: CopyWeightsRequest, key: str
) -> TinkerCheckpoint:
    """Copies a checkpoint into a new run. A `key` that was used before names the same copy.

    Raises ApiError 404 for one that the tenant may not read, and QuotaExceeded.
    """
    async with in_use(sessions.state, tenant, body.source_path) as source:
        return await _copy(sessions, tenant, body, key, source)


async def _copy(
    sessions: ClientSessions, tenant: Tenant, body: CopyWeightsRequest, key: str, source: TinkerCheckpoint
) -> TinkerCheckpoint:
    state = sessions.state
    now = int(state.store.clock())
    if body.session_id is not None:
        session = (await sessions.open_session(tenant, body.session_id)).id
        run = f"{session}:train:{body.model_seq_id or 0}"
    else:
        session = "copies-" + hashlib.sha256(f"{tenant.id} {key or new_id('copy')}".encode()).hexdigest()[:24]
        run = f"{session}:train:0"
        await state.store.tinker_sessions.add(
            TinkerSession(
                session,
                tenant.id,
                now,
                "copied weights",
                project=body.destination_project_id,
                finished={"type": "success"},
            )
        )
    await state.store.tinker_sessions.add(
        TinkerRun(run, tenant.id, session, source.base, source.lora, now, now)
    )
    expires = None if body.ttl_seconds is None else now + body.ttl_seconds
    return await add_checkpoint(
        state,
        TinkerCheckpoint(
            new_id("tinker"), tenant.id, run, source.kind, source.name, Path(), source.base, source.lora, 0,
            now, expires=expires, user_metadata=source.user_metadata,
        ),
        state.store.folder / source.path,
        copied=True,
    )  # fmt: skip


async def add_checkpoint(
    state: State,
    row: TinkerCheckpoint,
    source: Path,
    copied: bool = False,
    replace: bool = False,
    outcome: tuple[int, dict[str, Any]] | None = None,
    patience: float = 0.0,
) -> TinkerCheckpoint:
    """Adds a checkpoint whose files are in `source`. They are moved; with `copied` the source stays. It is
    the `outcome` of the run's request with a number. While storage is away it is tried for `patience`
    seconds.

    A path in use is an error (ApiError 400) unless `replace`. Copies of one path are all the same, so the
    existing one is returned. Raises QuotaExceeded. After an error nothing is left but the source of a copy.
    """
    store, folder = state.store, state.store.tinker_folder(row.id)
    try:
        await asyncio.to_thread(_place, source, folder, copied)
        row.path, row.bytes = store.path_of(folder), await asyncio.to_thread(bytes_in, folder)
        before = await insistently(
            lambda: store.tinker_checkpoints.add(row, replace, copied, outcome), patience
        )
    except FileExistsError:
        await store.artifacts.discard(folder)
        if copied:
            return await readable_checkpoint(state, Tenant(row.tenant, row.tenant), row.tinker_path)
        message = f"{row.tinker_path} exists already, and is immutable: choose another name."
        raise ApiError(400, message, code="checkpoint_exists") from None
    except BaseException:
        await store.artifacts.discard(folder)
        raise
    if before is not None:
        discarding = asyncio.create_task(_discard(state, before))
        _DISCARDING.add(discarding)
        discarding.add_done_callback(_DISCARDING.discard)
        await asyncio.wait({discarding}, timeout=_MOMENT)
    return row


async def _discard(state: State, replaced: TinkerCheckpoint) -> None:
    """Deletes the files of a checkpoint without a row, once no request uses them. After a crash the next
    start of the server deletes them."""
    await state.catalog.retire(replaced.id, None)
    state.catalog.removed(replaced.id)
    try:
        await state.link.unload(replaced.id)
        await state.store.artifacts.discard(state.store.folder / replaced.path)
    finally:
        state.catalog.forget(replaced.id)


def _place(source: Path, folder: Path, copied: bool) -> None:
    if copied:
        link_files(source, folder)
    elif source != folder:
        settle(source, folder)
