"""Sessions, the client's configuration, capabilities, health, and telemetry, which is dropped."""

from contextlib import suppress
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from coserve.serve.errors import ApiError
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.state import Shared
from coserve.serve.store.ids import new_id
from coserve.serve.store.records import TinkerSampler, TinkerSession
from coserve.serve.tinker.dialect import Tinker
from coserve.serve.tinker.schema import (
    ClientConfigRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    FinishSessionRequest,
    SessionBody,
)

router = APIRouter(prefix="/api/v1", route_class=JsonRoute, include_in_schema=False)

# Of the client's optional features these are on; all others stay off. A client holds a connection for each
# sample that it waits for, and one address may have 256.
CONFIG: Final[dict[str, Any]] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": True,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 4_000_000,
    "sample_max_concurrent_requests": 128,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG: Final[dict[str, Any]] = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answers while the server runs."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(body: ClientConfigRequest, caller: Caller) -> dict[str, Any]:
    """Optional features of the client that are on."""
    return CONFIG


@router.post("/client/dynamic_config")
async def client_dynamic_config(body: ClientConfigRequest, caller: Caller) -> dict[str, Any]:
    """As `client_config`, for what the client asks for again and again."""
    return DYNAMIC_CONFIG


@router.get("/get_server_capabilities")
async def get_server_capabilities(caller: Caller, state: Shared) -> dict[str, Any]:
    """The bases, which can be trained and sampled from, and the caller's adapters of them, which can be
    sampled from."""
    hello = state.link.hello
    return {
        "supported_models": [
            {
                "model_name": model.name,
                "max_context_length": None if hello is None else hello.of(model.base_id).positions,
                "trainable": model.adapter is None,
                "sampleable": True,
            }
            for model in await state.catalog.list(caller)
        ]
    }


@router.post("/telemetry")
async def telemetry(request: Request, caller: Caller) -> dict[str, str]:
    """Accepts the client's telemetry, and drops it unread."""
    async for _ in request.stream():
        pass
    return {"status": "accepted"}


@router.post("/create_session")
async def create_session(body: CreateSessionRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Begins a session."""
    row = TinkerSession(
        new_id("session"),
        caller.id,
        int(tinker.state.store.clock()),
        body.display_name,
        body.user_metadata,
        body.project_id,
    )
    await tinker.begin(row)
    return {"type": "create_session", "session_id": row.id}


@router.post("/session_heartbeat")
async def session_heartbeat(body: SessionBody, caller: Caller, tinker: Tinker) -> dict[str, str]:
    """A sign of life. Answers 410 where the session has ended."""
    await tinker.sessions.open_session(caller, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, body: FinishSessionRequest, caller: Caller, tinker: Tinker
) -> Response:
    """Ends a session; the first reason given stays."""
    await tinker.sessions.session(caller, session_id)
    await tinker.finish(caller, session_id, {"type": body.reason.type, "detail": body.detail})
    return Response(status_code=204)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: CreateSamplingSessionRequest, caller: Caller, state: Shared, tinker: Tinker
) -> dict[str, str]:
    """A sampling session of the base, of an adapter, or of the weights at a `tinker://` path."""
    await tinker.sessions.open_session(caller, body.session_id)
    name = body.model_path or body.base_model
    if name is None:
        raise ApiError(400, "Name a base_model or a model_path.", param="base_model")
    model = await state.catalog.find(caller, name)
    id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    await state.store.tinker_sessions.add(
        TinkerSampler(id, caller.id, body.session_id, model.name, int(state.store.clock()))
    )
    found = await tinker.sessions.sampler(caller, id)
    if found.model != model.name:
        raise ApiError(400, f"The sampling session {id} is of '{found.model}' already.")
    return {"type": "create_sampling_session", "sampling_session_id": id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, caller: Caller, state: Shared, tinker: Tinker) -> dict[str, Any]:
    """The weights that a sampling session samples from."""
    found, base = await tinker.sessions.sampler(caller, sampler_id), state.catalog.base.name
    with suppress(ApiError):  # where its adapter is gone
        base = (await state.catalog.find(caller, found.model)).base
    path = None if found.model == base else found.model
    return {"sampler_id": found.id, "base_model": base, "model_path": path}
