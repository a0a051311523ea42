"""`/v1/models`: the names that a caller may use where requests have a `model`."""

import asyncio

from fastapi import APIRouter, Response

from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.adapter_registry.registry import base_warning, remove_adapter
from coserve.serve.errors import error_responses
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_replies import WrittenJson, json_reply, written_later
from coserve.serve.schema.models import CodexModel, ModelCard, ModelDeleted, ModelList
from coserve.serve.state import Shared, State

router = APIRouter(tags=["Models"])


@router.get("/v1/models", response_model=ModelList, responses=error_responses(), summary="List models")
async def list_models(caller: Caller, state: Shared) -> Response:
    """The base models, mostly one, and the adapters that the caller may use: its own, and the shared ones.
    `models` tells the same to Codex, in its own terms."""
    models = await state.catalog.list(caller)
    shown = [WrittenJson(written_later(_described, state, model)) for model in models]
    codex = [
        WrittenJson(written_later(_for_codex, state, model, place)) for place, model in enumerate(models)
    ]
    return await json_reply(state.bodies, caller.id, {"object": "list", "data": shown, "models": codex})


@router.get("/v1/models/{model:path}", responses=error_responses(404), summary="Retrieve a model")
async def retrieve_model(model: str, caller: Caller, state: Shared) -> ModelCard:
    """Describes one model. Checkpoints are not listed, but found here."""
    return await asyncio.to_thread(_described, state, await state.catalog.find(caller, model))


@router.delete(
    "/v1/models/{model:path}", responses=error_responses(403, 404, 409), summary="Delete an adapter"
)
async def delete_model(model: str, caller: Caller, state: Shared) -> ModelDeleted:
    """Deletes one of the caller's own adapters, once the answers that use it have ended."""
    await remove_adapter(state, caller, await state.catalog.find(caller, model))
    return ModelDeleted(id=model)


def _described(state: State, model: Model) -> ModelCard:
    """A model's card with its warning, which is read from a file the first time."""
    warning = None if model.adapter is None else base_warning(state, model.adapter)
    return card_of(state, model).model_copy(update={"warning": warning})


def _for_codex(state: State, model: Model, place: int) -> CodexModel:
    """A model as Codex reads it."""
    hello = state.link.hello
    return CodexModel(
        slug=model.name,
        display_name=model.name,
        priority=place,
        context_window=None if hello is None else hello.of(model.base_id).positions,
    )


def card_of(state: State, model: Model) -> ModelCard:
    """A model as clients see it."""
    adapter, hello = model.adapter, state.link.hello
    return ModelCard(
        id=model.name,
        created=model.created,
        owned_by="coserve" if adapter is None or adapter.tenant is None else adapter.tenant,
        root=model.base,
        parent=None if adapter is None else adapter.parent or model.base,
        max_model_len=None if hello is None else hello.of(model.base_id).positions,
        pinned=adapter is not None and adapter.pinned,
        location=None if adapter is None else "memory" if adapter.id in state.link.resident else "disk",
    )
