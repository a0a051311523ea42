"""Loading and unloading adapters (`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM), and
pinning."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from coserve.serve.adapter_registry.imports import folder_below
from coserve.serve.adapter_registry.registry import base_warning, import_adapter, pin_adapter, remove_adapter
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.routes.models import card_of
from coserve.serve.schema.models import LoadAdapterRequest, ModelCard, UnloadAdapterRequest
from coserve.serve.state import Shared

router = APIRouter(route_class=JsonRoute, tags=["Adapters"])


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    responses=error_responses(403, 404, 409, 422),
    openapi_extra=KEYED,
    summary="Load an adapter",
)
async def load_lora_adapter(body: LoadAdapterRequest, caller: Caller, state: Shared) -> PlainTextResponse:
    """Copies an adapter into the server and gives it a name. It stays until it is unloaded or deleted.
    With `load_inplace` it replaces the caller's adapter of that name: each answer is of one of them.

    Only a configuration in JSON and weights in safetensors are ever read.
    """
    root = state.settings.adapter_root
    if root is None:
        message = "This server loads no adapters by path: it was started without --adapter-root."
        raise ApiError(403, message, code="adapter_root_not_set")
    source = await asyncio.to_thread(folder_below, root, body.lora_path)
    replace = bool(body.load_inplace)
    adapter = await import_adapter(state, caller, body.lora_name, source, "lora_name", replace)
    warning = await asyncio.to_thread(base_warning, state, adapter)
    success = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    return PlainTextResponse(success if warning is None else f"{success} {warning}")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses=error_responses(403, 404, 409),
    summary="Unload an adapter",
)
async def unload_lora_adapter(body: UnloadAdapterRequest, caller: Caller, state: Shared) -> PlainTextResponse:
    """Removes an adapter's name, waits for the answers that use it, and deletes the server's copy."""
    await remove_adapter(state, caller, await state.catalog.find(caller, body.lora_name))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post(
    "/v1/adapters/{name:path}/pin", responses=error_responses(403, 404, 409), summary="Pin an adapter"
)
async def pin(name: str, caller: Caller, state: Shared) -> ModelCard:
    """Keeps an adapter in memory. Others are loaded from disk on demand and may be evicted; pinned ones may
    take half of the room."""
    await pin_adapter(state, await state.catalog.find(caller, name), True)
    return card_of(state, await state.catalog.find(caller, name))


@router.delete(
    "/v1/adapters/{name:path}/pin", responses=error_responses(403, 404, 409), summary="Unpin an adapter"
)
async def unpin(name: str, caller: Caller, state: Shared) -> ModelCard:
    """Lets an adapter be evicted from memory again."""
    await pin_adapter(state, await state.catalog.find(caller, name), False)
    return card_of(state, await state.catalog.find(caller, name))
