"""Checkpoints of training runs, and the runs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from coserve.adapters.folder import CONFIG, WEIGHTS
from coserve.serve.errors import ApiError, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.state import Shared, State
from coserve.serve.store.records import Tenant, TinkerCheckpoint, TinkerRun, TinkerSession
from coserve.serve.store.tinker import SCHEME
from coserve.serve.tinker.checkpoints import copy_checkpoint, delete_checkpoint, readable_checkpoint
from coserve.serve.tinker.described import told_checkpoint, told_run, told_time
from coserve.serve.tinker.dialect import Dialect, Tinker
from coserve.serve.tinker.schema import CopyWeightsRequest, TtlRequest, WeightsInfoRequest

router = APIRouter(prefix="/api/v1", route_class=JsonRoute, include_in_schema=False)
open_router = APIRouter(include_in_schema=False)  # of links that need no key

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**62)]
_CHECKPOINT: Final = "/training_runs/{run}/checkpoints/{checkpoint:path}"


@router.get("/training_runs")
async def list_runs(
    caller: Caller,
    state: Shared,
    tinker: Tinker,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
) -> Response:
    """The caller's training runs, the newest first."""
    wanted = []
    if project_id is not None:
        wanted.append(TinkerRun.session == TinkerSession.id)
        wanted.append(TinkerSession.project == project_id)
    rows, total = await state.store.tinker_sessions.page(TinkerRun, caller.id, offset, limit, *wanted)
    runs = await _told_runs(tinker, caller, rows)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return await json_reply(state.bodies, caller.id, {"training_runs": runs, "cursor": cursor})


@router.get("/training_runs/{run}")
async def get_run(run: str, caller: Caller, state: Shared, tinker: Tinker) -> dict[str, Any]:
    """One of the caller's training runs."""
    (told,) = await _told_runs(tinker, caller, [await _run(state, caller, run)])
    return told


@router.get("/training_runs/{run}/checkpoints")
async def list_checkpoints(run: str, caller: Caller, state: Shared) -> Response:
    """A run's checkpoints, the newest first."""
    await _run(state, caller, run)
    rows, _ = await state.store.tinker_checkpoints.page(caller.id, state.store.clock(), run)
    told = [WrittenJson(written_later(told_checkpoint, row)) for row in rows]
    return await json_reply(state.bodies, caller.id, {"checkpoints": told})


@router.get("/checkpoints")
async def list_user_checkpoints(
    caller: Caller, state: Shared, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """Checkpoints of all the caller's runs, the newest first."""
    rows, total = await state.store.tinker_checkpoints.page(
        caller.id, state.store.clock(), offset=offset, limit=limit
    )
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    told = [WrittenJson(written_later(told_checkpoint, row)) for row in rows]
    return await json_reply(state.bodies, caller.id, {"checkpoints": told, "cursor": cursor})


@router.post("/weights_info")
async def weights_info(body: WeightsInfoRequest, caller: Caller, state: Shared) -> dict[str, Any]:
    """Settings that a training client for these weights has to be made with."""
    row = await readable_checkpoint(state, caller, body.tinker_path)
    lora = row.lora
    return {
        "base_model": row.base,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": lora["rank"],
        "train_unembed": lora["train_unembed"],
        "train_mlp": lora["train_mlp"],
        "train_attn": lora["train_attn"],
    }


@router.post("/copy_weights")
async def copy_weights(
    body: CopyWeightsRequest, request: Request, caller: Caller, tinker: Tinker
) -> dict[str, str]:
    """A copy of readable weights, in a run of its own that cannot be trained."""
    key = request.headers.get("x-idempotency-key", "")
    row = await copy_checkpoint(tinker.sessions, caller, body, key)
    return {"tinker_path": row.tinker_path}


@router.post(f"{_CHECKPOINT}/publish")
async def publish(run: str, checkpoint: str, caller: Caller, state: Shared) -> Response:
    """Lets all callers read a checkpoint, by its path."""
    row = await _own(state, caller, run, checkpoint)
    await state.store.tinker_checkpoints.change(row.id, public=True)
    return Response(status_code=204)


@router.delete(f"{_CHECKPOINT}/publish")
async def unpublish(run: str, checkpoint: str, caller: Caller, state: Shared) -> Response:
    """Lets nobody but the caller read a checkpoint."""
    row = await _own(state, caller, run, checkpoint)
    await state.store.tinker_checkpoints.change(row.id, public=False)
    return Response(status_code=204)


@router.put(f"{_CHECKPOINT}/ttl")
async def set_ttl(run: str, checkpoint: str, body: TtlRequest, caller: Caller, state: Shared) -> Response:
    """Has a checkpoint expire so many seconds from now, or never."""
    row = await _own(state, caller, run, checkpoint)
    expires = None if body.ttl_seconds is None else int(state.store.clock()) + body.ttl_seconds
    await state.store.tinker_checkpoints.change(row.id, expires=expires)
    return Response(status_code=204)


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run: str, checkpoint: str, request: Request, caller: Caller, state: Shared, tinker: Tinker
) -> dict[str, Any]:
    """Links to the files of an external checkpoint, in PEFT's format, that need no key and expire."""
    row = await _own(state, caller, run, checkpoint)
    if row.kind != "external_weights":
        raise ApiError(400, f"{row.tinker_path} are no external weights.")
    signed = {file: tinker.links.sign(row.id, file) for file in (CONFIG, WEIGHTS)}
    root = str(request.base_url).rstrip("/")
    expires = min(expires for _, expires in signed.values())
    return {"urls": {file: root + path for file, (path, _) in signed.items()}, "expires": told_time(expires)}


@open_router.get("/tinker/weights/{checkpoint}/{file}")
async def download(
    checkpoint: str, file: str, expires: int, signature: str, state: Shared, tinker: Tinker
) -> FileResponse:
    """A file by a signed link."""
    path: Path = state.store.tinker_folder(checkpoint) / file
    if file not in (CONFIG, WEIGHTS) or not tinker.links.check(checkpoint, file, expires, signature):
        raise not_found("This link is not valid, or not any more.")
    await state.store.artifacts.get(path.parent)
    if not await asyncio.to_thread(path.is_file):
        raise not_found("The file was deleted.")
    return FileResponse(path, filename=file)


@router.delete(_CHECKPOINT)
async def delete(run: str, checkpoint: str, caller: Caller, state: Shared) -> Response:
    """Deletes a checkpoint, once the answers that use it have ended."""
    await delete_checkpoint(state, await _own(state, caller, run, checkpoint))
    return Response(status_code=204)


async def _run(state: State, caller: Tenant, id: str) -> TinkerRun:
    found = await state.store.tinker_sessions.get(TinkerRun, caller.id, id)
    if found is None:
        raise not_found(f"There is no training run '{id}', or it is not yours.")
    return found


async def _told_runs(tinker: Dialect, caller: Tenant, rows: Sequence[TinkerRun]) -> list[dict[str, Any]]:
    last = await tinker.state.store.tinker_checkpoints.newest(
        caller.id, tinker.state.store.clock(), [row.id for row in rows]
    )
    told = []
    for row in rows:
        row.used = tinker.runs.used(row)
        told.append(told_run(row, last.get((row.id, "weights")), last.get((row.id, "sampler_weights"))))
    return told


async def _own(state: State, caller: Tenant, run: str, checkpoint: str) -> TinkerCheckpoint:
    path = f"{SCHEME}{run}/{checkpoint}"
    found = await state.store.tinker_checkpoints.find(caller.id, path, state.store.clock(), own=True)
    if found is None:
        raise not_found(f"There is no checkpoint '{path}', or it is not yours.")
    return found
