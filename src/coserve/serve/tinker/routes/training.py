"""Training runs: their passes, optimizer steps and saved weights."""

import json
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect

from coserve.serve.errors import ApiError
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.state import Shared
from coserve.serve.tinker.dialect import Dialect, Tinker
from coserve.serve.tinker.futures import TinkerFuture
from coserve.serve.tinker.passes import UnreadPass, read_pass
from coserve.serve.tinker.runs import run_of
from coserve.serve.tinker.schema import (
    CreateModelRequest,
    LoadWeightsRequest,
    ModelBody,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

_MOST_REFUSED: Final = 64 * 1024  # bytes of a refused body that is read again: 3 ms at most


class _CommandRoute(JsonRoute):
    """A route whose refused requests take their turns: clients number commands before they send them, and do
    not send a refused one's number again."""

    def refused(self, request: Request, body: bytes) -> None:
        tinker: Dialect = request.app.state.tinker
        if len(body) <= _MOST_REFUSED and (named := _named(body)) is not None:
            tinker.requests.refused(request.state.tenant, *named)


router = APIRouter(prefix="/api/v1", route_class=_CommandRoute, include_in_schema=False)


@router.post("/create_model")
async def create_model(body: CreateModelRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Begins a training run with a fresh LoRA adapter."""
    tinker.watch()
    return _promise(await tinker.runs.create(caller, body))


@router.post("/get_info")
async def get_info(body: ModelBody, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """The base and the adapter of an open run."""
    await tinker.runs.check_here(caller, body.model_id)
    row = tinker.runs.find(caller, body.model_id).row
    return {
        "type": "get_info",
        "model_id": row.id,
        "model_name": row.base,
        "model_data": {"model_name": row.base, "tokenizer_id": row.base},
        "is_lora": True,
        "lora_rank": row.lora["rank"],
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, caller: Caller, state: Shared, tinker: Tinker) -> dict[str, Any]:
    """A pass over data in protobuf, forward and back, or only forward."""
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise ApiError(400, "The body ended early.") from error
    encoding = request.headers.get("content-encoding", "").strip().lower()
    try:
        read = await state.bodies.run(caller.id, read_pass, body, encoding)
    except UnreadPass as error:
        tinker.requests.refused(caller, error.model_id, error.seq_id)
        raise
    await tinker.runs.check_here(caller, read.model_id)
    return _promise(await tinker.requests.forward(caller, read, body, encoding))


@router.post("/optim_step")
async def optim_step(body: OptimStepRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """A step of AdamW by the gradients since the last one."""
    await tinker.runs.check_here(caller, body.model_id)
    return _promise(await tinker.requests.optim_step(caller, body))


@router.post("/save_weights")
async def save_weights(body: SaveWeightsRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Saves weights and the optimizer's state."""
    await tinker.runs.check_here(caller, body.model_id)
    return _promise(await tinker.requests.save_state(caller, body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveWeightsForSamplerRequest, caller: Caller, tinker: Tinker
) -> dict[str, Any]:
    """Saves weights to sample from: a version that never changes."""
    await tinker.runs.check_here(caller, body.model_id)
    return _promise(await tinker.requests.save_for_sampler(caller, body))


@router.post("/save_weights_external")
async def save_weights_external(
    body: SaveWeightsExternalRequest, caller: Caller, tinker: Tinker
) -> dict[str, Any]:
    """Saves weights in PEFT's format, for download."""
    await tinker.runs.check_here(caller, body.model_id)
    return _promise(await tinker.requests.save_external(caller, body))


@router.post("/load_weights")
async def load_weights(body: LoadWeightsRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Has a run go on from saved weights; without a `model_id` a new one."""
    if body.model_id is None:
        tinker.watch()
        return _promise(await tinker.runs.create_from(caller, body))
    await tinker.runs.check_here(caller, body.model_id)
    return _promise(await tinker.requests.load(caller, body))


@router.post("/unload_model")
async def unload_model(body: ModelBody, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Ends a run."""
    await tinker.runs.check_here(caller, body.model_id, confirmed=True)
    return _promise(tinker.runs.unload(caller, body.model_id))


def _promise(future: TinkerFuture) -> dict[str, Any]:
    return {"request_id": future.id, "model_id": run_of(future.id)}


def _named(body: bytes) -> tuple[str, int] | None:
    """The run and the number of a refused body, if it has both. Python's reader takes what ours refuses: NaN,
    and numbers with many digits."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"model_id": str() as id, "seq_id": int() as number} if not isinstance(number, bool):
            return id, number
    return None
