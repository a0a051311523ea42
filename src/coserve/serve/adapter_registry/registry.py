"""Registers and removes named adapters on disk, in the engine and in the database, all or nothing."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from coserve.errors import AdapterError, AdapterMismatch, CoserveError
from coserve.serve.adapter_registry.catalog import Model, unknown_model
from coserve.serve.adapter_registry.imports import base_among, copy_adapter, other_base
from coserve.serve.errors import ApiError
from coserve.serve.state import State
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import Adapter, Tenant

# Seconds in which a replaced adapter may still be used: between a request's finding it and its use lie some
# reads of the database, a few milliseconds.
GRACE_SECONDS: Final = 10.0
# Replacements of a tenant that are under way, or whose old adapter is there, which counts towards no quota.
MOST_REPLACED: Final = 8
_KNOWN: Final = 4096  # adapters whose base is remembered
_REMOVING: Final[set["asyncio.Task[None]"]] = set()  # of tasks: the loop alone would not keep them
_replaced: Final = Counter[str]()  # by tenant


async def import_adapter(
    state: State, tenant: Tenant, name: str, source: Path, param: str = "name", replace: bool = False
) -> Adapter:
    """Imports an adapter for the tenant: copies the folder `source`, once the engine has accepted it. It is
    one of the base that its configuration names, or else of the first. With `replace` it takes the name of an
    own one, in one transaction: answers that use that go on with it, and it is deleted once they have ended.

    Raises ApiError 400 for a name in use, 403 and 409 for one that may not be replaced, and 429 for more than
    `MOST_REPLACED` at once; AdapterError for invalid files or a wrong base; and QuotaExceeded. The copy is
    removed on any error and on cancellation.
    """
    base = state.catalog.base.name
    taken = ApiError(400, f"The name '{name}' is taken already.", param=param, code="adapter_already_loaded")
    names = state.catalog.bases
    same = [await state.store.adapters.find(tenant.id, name, one) for one in names]
    old = next((one for one in same if one is not None), None)
    if name in names or (old is not None and not replace):
        raise taken
    if old is not None:
        _check_own(name, old)
    if replace and _replaced[tenant.id] >= MOST_REPLACED:
        message = f"{MOST_REPLACED} adapters that you replaced are still in use; try again in some seconds."
        raise ApiError(429, message, param=param, code="rate_limit_exceeded")
    _replaced[tenant.id] += replace
    key = new_id("adapter")
    folder = state.store.adapter_folder(key)
    is_adding = False
    copying = asyncio.ensure_future(
        state.adapters.run(tenant.id, copy_adapter, source, folder, state.settings.max_file_bytes)
    )
    try:
        await asyncio.shield(copying)  # its thread goes on where the request was cancelled
        if state.settings.bases:
            named = await asyncio.to_thread(base_among, folder, state.settings.bases)
            base = named or base
        await state.link.load(key, folder, new=True, base=state.settings.base_id(base))
        adapter = Adapter(key, name, state.store.path_of(folder), base, int(state.store.clock()), tenant.id)
        if old is not None and old.pinned:
            await state.link.pin(key, folder, True, state.settings.base_id(base))
            adapter.pinned = True
        is_adding = True
        if replace:
            old = await state.store.adapters.replace(adapter)
        elif not await state.store.adapters.add(adapter):
            raise taken
    except BaseException as error:
        _replaced[tenant.id] -= replace
        if is_adding and isinstance(error, asyncio.CancelledError):
            raise  # its row may be there; if not, the next start sweeps the copy
        other = _other_base(state, base, folder)
        removing = asyncio.create_task(_remove_copy(state, key, folder, copying))
        _REMOVING.add(removing)
        removing.add_done_callback(_REMOVING.discard)
        await asyncio.shield(removing)
        if not isinstance(error, AdapterError):
            raise
        # Paths of the state folder are not shown to clients.
        reason = str(error).replace(f"{folder}/", "").removeprefix(f"{folder}: ")
        if isinstance(error, AdapterMismatch) and other is not None:
            reason += f"; its configuration names the base {other!r}, and this server's is {base!r}"
        raise type(error)(reason) from error
    if replace and old is not None:
        leaving = asyncio.create_task(_remove_replaced(state, old))
        _REMOVING.add(leaving)
        leaving.add_done_callback(_REMOVING.discard)
        leaving.add_done_callback(lambda _: _replaced.subtract([tenant.id]))
    else:
        _replaced[tenant.id] -= replace
    return adapter


async def _remove_replaced(state: State, old: Adapter) -> None:
    """Removes an adapter that has no name any more, once nobody uses it. Where the server ends before, the
    next one's start sweeps its folder."""
    await asyncio.sleep(GRACE_SECONDS)
    await state.catalog.retire(old.id, None)
    await _remove_unused(state, old)


async def _remove_copy(state: State, key: str, folder: Path, copying: "asyncio.Future[None]") -> None:
    """Removes the folder of a failed import, once copying has ended."""
    await asyncio.gather(copying, return_exceptions=True)
    with suppress(CoserveError):
        await state.link.unload(key)
    await state.store.artifacts.discard(folder)


def base_warning(state: State, adapter: Adapter) -> str | None:
    """Warning for an imported adapter that fits, but names another base; else None. The first call reads a
    file."""
    if adapter.job is not None:  # trained here
        return None
    folder = state.store.folder_of(adapter)
    if not folder.is_dir():  # no request has named it here so far: its files are in the artifact store
        return None
    other = _known_base(folder, adapter.base, _model_of(state, adapter.base))
    if other is None:
        return None
    return (
        f"The adapter's configuration names the base {other!r}, and this server's is "
        f"{adapter.base!r}. Its shapes fit, so it was taken; if it was trained on another model "
        "its answers make no sense."
    )


@lru_cache(_KNOWN)
def _known_base(folder: Path, *own: str) -> str | None:
    """`other_base` of a stored adapter, cached, as its files never change."""
    return other_base(folder, *own)


def _other_base(state: State, base: str, folder: Path) -> str | None:
    return other_base(folder, base, _model_of(state, base))


def _model_of(state: State, base: str) -> str:
    """Folder or hub name of a base model."""
    return state.settings.bases.get(base, state.settings.model)


async def remove_adapter(state: State, tenant: Tenant, model: Model) -> None:
    """Deletes a tenant's own adapter once it is unused. Raises ApiError 403, 404 or 409."""
    adapter = _check_own(model.name, model.adapter)
    if not await state.catalog.retire(adapter.id, state.settings.drain_seconds):
        message = f"Answers that use '{model.name}' are still under way; it stays as it was."
        raise ApiError(409, message, code="adapter_in_use")
    try:
        if await state.store.adapters.remove(tenant.id, model.name) is None:
            raise unknown_model(model.name)
    except BaseException:
        state.catalog.forget(adapter.id)
        raise
    await _remove_unused(state, adapter)


def _check_own(name: str, adapter: Adapter | None) -> Adapter:
    """The adapter, if its tenant may delete it. Raises ApiError 403 or 409."""
    if adapter is None or adapter.tenant is None:
        raise ApiError(403, f"The model '{name}' belongs to the server and cannot be deleted.")
    if adapter.step is not None:
        raise ApiError(409, f"'{name}' is a checkpoint and goes with its job.", code="is_checkpoint")
    return adapter


async def _remove_unused(state: State, adapter: Adapter) -> None:
    """Removes a retired adapter without a row from the engine and from the disk."""
    try:
        state.catalog.removed(adapter.id)
        await state.link.unload(adapter.id)
    finally:
        state.catalog.forget(adapter.id)
    if not adapter.path.is_absolute():  # it lies in the state folder
        await state.store.artifacts.discard(state.store.folder_of(adapter))


async def pin_adapter(state: State, model: Model, pinned: bool) -> None:
    """Pins an adapter in memory, also of later engines, or unpins it. Raises ApiError 403, 404 or 409, and
    OutOfMemory where too much is pinned."""
    adapter = model.adapter
    if adapter is None:
        raise ApiError(403, f"The model '{model.name}' is the base, which is always in memory.")
    if adapter.step is not None:
        raise ApiError(409, f"'{model.name}' is a checkpoint, which cannot be pinned.", code="is_checkpoint")
    with state.catalog.use(model):
        await state.link.pin(adapter.id, state.store.folder_of(adapter), pinned, model.base_id)
        await state.store.adapters.pin(adapter.id, pinned)
