"""Loading and unloading adapters (`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM),
pinning, and what is known of them."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.adapter_registry.imports import folder_below
from coserve.serve.adapter_registry.lineage import lineage_of
from coserve.serve.adapter_registry.registry import base_warning, import_adapter, pin_adapter, remove_adapter
from coserve.serve.errors import ApiError, error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.idempotency import KEYED
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.http.pages import unknown_cursor
from coserve.serve.routes.models import card_of
from coserve.serve.schema.models import LoadAdapterRequest, ModelCard, UnloadAdapterRequest
from coserve.serve.state import Shared, State


class AdapterCard(ModelCard):
    """An adapter or a checkpoint."""

    bytes: int = Field(description="Of its files on the disk; 0 of an adapter that the operator shares.")
    requests: int | None = Field(
        description="Answers and sessions that use it now; null of one that is shared with other tenants."
    )
    jobs: list[str] = Field(description="The caller's unfinished jobs that began with it or learn from it.")
    job: str | None = Field(description="The job that trained it; null of an imported one.")
    step: int | None = Field(description="Optimizer steps of a checkpoint; null of others.")


class AdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AdapterCard]
    has_more: bool


class Ancestor(BaseModel):
    """One thing that an adapter comes from. A deleted one has only its name."""

    kind: Literal["adapter", "job", "training_file", "validation_file", "base"]
    id: str
    name: str
    exists: bool
    created_at: int | None = None
    bytes: int | None = None
    examples: int | None = Field(default=None, description="Of a file.")
    method: str | None = Field(default=None, description="Of a job: its training method.")
    steps: int | None = Field(default=None, description="Of a job: the optimizer steps that it made.")
    status: str | None = Field(default=None, description="Of a job.")


class Lineage(BaseModel):
    """From an adapter back to its base: each adapter, the job that made it, and the data of that job."""

    object: Literal["adapter.lineage"] = "adapter.lineage"
    data: list[Ancestor]
    has_more: bool = Field(description="Whether there are more than 32 adapters one behind the other.")


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


@router.get("/v1/adapters", response_model=AdapterList, responses=error_responses(), summary="List adapters")
async def list_adapters(
    caller: Caller,
    state: Shared,
    after: Annotated[str | None, Query(description="The last one of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The caller's adapters and those that are shared, the newest first, with their size, where they are, and
    what uses them now. Checkpoints are not listed."""
    page = await state.store.adapters.page(caller.id, list(state.catalog.bases), after, limit)
    if page is None:
        raise unknown_cursor(after)
    users = await state.store.jobs.users([adapter.id for adapter in page.records], caller.id)
    models = [state.catalog.model_of(adapter) for adapter in page.records]
    shown = [
        WrittenJson(written_later(_card, state, model, users.get(model.key or "", []))) for model in models
    ]
    return await json_reply(
        state.bodies, caller.id, {"object": "list", "data": shown, "has_more": page.has_more}
    )


@router.get(
    "/v1/adapters/{name:path}/lineage",
    responses=error_responses(404),
    summary="Tell where an adapter comes from",
)
async def tell_lineage(name: str, caller: Caller, state: Shared) -> Lineage:
    """An adapter or checkpoint, the job that trained it, that job's data, the adapter that this began with,
    and so on back to the base."""
    found, has_more = await lineage_of(state, caller, await state.catalog.find(caller, name))
    return Lineage.model_validate({"data": found, "has_more": has_more})


def _card(state: State, model: Model, jobs: list[str]) -> AdapterCard:
    adapter = model.adapter
    assert adapter is not None, "an adapter's card"
    return AdapterCard.model_validate(
        {
            **card_of(state, model).model_dump(),
            "warning": base_warning(state, adapter),
            "bytes": adapter.bytes,
            "requests": None if adapter.tenant is None else state.catalog.users_of(adapter.id),
            "jobs": jobs,
            "job": adapter.job,
            "step": adapter.step,
        }
    )


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
