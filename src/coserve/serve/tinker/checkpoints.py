"""Checkpoints as files and rows: reading, copying and deleting them."""

import asyncio
import hashlib
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from coserve.serve.errors import ApiError, not_found
from coserve.serve.state import State
from coserve.serve.store.durable import partial_of, settle
from coserve.serve.store.ids import new_id
from coserve.serve.store.quotas import bytes_in
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSession
from coserve.serve.tinker.schema import CopyWeightsRequest
from coserve.serve.tinker.sessions import ClientSessions

MOST_TEMPORARY: Final = 16  # checkpoints of one run that samplers without a name have
_MOMENT: Final = 0.05  # seconds


async def readable_checkpoint(state: State, tenant: Tenant, path: str) -> TinkerCheckpoint:
    """The checkpoint at a `tinker://` path that a tenant may read. Raises ApiError 404."""
    found = await state.store.tinker_checkpoints.find(tenant.id, path, time.time())
    if found is None:
        raise not_found(f"There is no checkpoint '{path}', or you may not read it.", param="path")
    return found


async def delete_checkpoint(state: State, row: TinkerCheckpoint, patience: float | None = None) -> None:
    """Deletes a checkpoint once nobody uses it. Raises ApiError 400 where answers that use it go on for
    longer than `patience` seconds, by default the server's own."""
    if not await state.catalog.retire(row.id, state.settings.drain_seconds if patience is None else patience):
        # No 409: clients would send it again for minutes.
        raise ApiError(400, f"Answers that use {row.tinker_path} are still under way.", code="adapter_in_use")
    try:
        await state.link.unload(row.id)
        await state.store.tinker_checkpoints.remove(row.id)
    finally:
        state.catalog.forget(row.id)


async def trim_temporary(state: State, session: str, run: str) -> None:
    """Deletes a run's oldest temporary checkpoints beyond `MOST_TEMPORARY`, but for those in use."""
    own = [row for row in await state.store.tinker_checkpoints.temporary(session) if row.run == run]
    for row in own[:-MOST_TEMPORARY]:
        with suppress(ApiError):
            await delete_checkpoint(state, row, _MOMENT)


async def copy_checkpoint(
    sessions: ClientSessions, tenant: Tenant, body: CopyWeightsRequest, key: str
) -> TinkerCheckpoint:
    """Copies a checkpoint into a new run. A `key` that was used before names the same copy.

    Raises ApiError 404 for one that the tenant may not read, and QuotaExceeded.
    """
    state, now = sessions.state, int(time.time())
    source = await readable_checkpoint(state, tenant, body.source_path)
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
    state: State, row: TinkerCheckpoint, source: Path, copied: bool = False, replace: bool = False
) -> TinkerCheckpoint:
    """Adds a checkpoint whose files are in `source`, which is moved, or with `copied` stays.

    A path in use is an error (ApiError 400) unless `replace`, but for copies, which are all the same: the one
    that is there is returned. Raises QuotaExceeded. After an error nothing is left but the source of a copy.
    """
    store, folder = state.store, state.store.tinker_folder(row.id)
    try:
        await asyncio.to_thread(_place, source, folder, copied)
        row.path, row.bytes = store.path_of(folder), await asyncio.to_thread(bytes_in, folder)
        before = await store.tinker_checkpoints.add(row, replace)
    except FileExistsError:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if copied:
            return await readable_checkpoint(state, Tenant(row.tenant, row.tenant), row.tinker_path)
        message = f"{row.tinker_path} exists already, and is immutable: choose another name."
        raise ApiError(400, message, code="checkpoint_exists") from None
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    if before is not None:
        await state.link.unload(before.id)
        await asyncio.to_thread(shutil.rmtree, store.folder / before.path, ignore_errors=True)
    return row


def _place(source: Path, folder: Path, copied: bool) -> None:
    if copied:
        partial = partial_of(folder)
        shutil.copytree(source, partial)
        settle(partial, folder)
    elif source != folder:
        settle(source, folder)
