"""Training runs: their passes, optimizer steps and saved weights."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect

from coserve.serve.errors import ApiError
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.state import Shared
from coserve.serve.tinker.dialect import Tinker
from coserve.serve.tinker.futures import TinkerFuture
from coserve.serve.tinker.passes import read_pass
from coserve.serve.tinker.schema import (
    CreateModelRequest,
    LoadWeightsRequest,
    ModelBody,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

router = APIRouter(prefix="/api/v1", route_class=JsonRoute, include_in_schema=False)


@router.post("/create_model")
async def create_model(body: CreateModelRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Begins a training run with a fresh LoRA adapter."""
    return _promise(await tinker.runs.create(caller, body))


@router.post("/get_info")
async def get_info(body: ModelBody, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """The base and the adapter of an open run."""
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
    read = await state.bodies.run(caller.id, read_pass, body, encoding)
    return _promise(tinker.requests.forward(caller, read))


@router.post("/optim_step")
async def optim_step(body: OptimStepRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """A step of AdamW by the gradients since the last one."""
    return _promise(tinker.requests.optim_step(caller, body))


@router.post("/save_weights")
async def save_weights(body: SaveWeightsRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Saves weights and the optimizer's state."""
    return _promise(tinker.requests.save_state(caller, body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveWeightsForSamplerRequest, caller: Caller, tinker: Tinker
) -> dict[str, Any]:
    """Saves weights to sample from: a version that never changes."""
    return _promise(tinker.requests.save_for_sampler(caller, body))


@router.post("/save_weights_external")
async def save_weights_external(
    body: SaveWeightsExternalRequest, caller: Caller, tinker: Tinker
) -> dict[str, Any]:
    """Saves weights in PEFT's format, for download."""
    return _promise(tinker.requests.save_external(caller, body))


@router.post("/load_weights")
async def load_weights(body: LoadWeightsRequest, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Has a run go on from saved weights; without a `model_id` a new one."""
    if body.model_id is None:
        return _promise(await tinker.runs.create_from(caller, body))
    return _promise(tinker.requests.load(caller, body))


@router.post("/unload_model")
async def unload_model(body: ModelBody, caller: Caller, tinker: Tinker) -> dict[str, Any]:
    """Ends a run."""
    return _promise(tinker.runs.unload(caller, body.model_id))


def _promise(future: TinkerFuture) -> dict[str, Any]:
    run = ":".join(future.id.split(":")[:3])
    return {"request_id": future.id, "model_id": run}
