"""`GET /v1/models` in Anthropic's form, for clients that send `anthropic-version`."""

from typing import Final

from fastapi import APIRouter, Depends, Request
from starlette.routing import Match
from starlette.types import Scope

from coserve.serve.adapter_registry.catalog import Model
from coserve.serve.anthropic.batch_schema import (
    MOST_PAGED,
    Cursor,
    ModelInfo,
    ModelInfos,
    PageSize,
    no_such_cursor,
    one_cursor,
    told_time,
)
from coserve.serve.anthropic.errors import ERRORS
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.state import Shared, State

_HEADER: Final = b"anthropic-version"


class _AnthropicRoute(JsonRoute):
    """A route for requests with Anthropic's header; others go on to the next route of their path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if all(name != _HEADER for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


async def _in_its_form(request: Request) -> None:
    """Gives the request's errors Anthropic's form, which paths have elsewhere."""
    request.scope["state"]["error_shape"] = ERRORS


# Not in the document of the API: it has one entry for a path, which is OpenAI's.
router = APIRouter(route_class=_AnthropicRoute, dependencies=[Depends(_in_its_form)], include_in_schema=False)


@router.get("/v1/models")
async def list_models(
    caller: Caller,
    state: Shared,
    after_id: Cursor = None,
    before_id: Cursor = None,
    limit: PageSize = 20,
) -> ModelInfos:
    """The base models and the adapters that the caller may use."""
    models = await state.catalog.list(caller)
    at, is_backwards = one_cursor(after_id, before_id)
    if at is not None:
        place = next((place for place, model in enumerate(models) if model.name == at), None)
        if place is None:
            raise no_such_cursor(at)
        models = models[:place] if is_backwards else models[place + 1 :]
    most = min(limit, MOST_PAGED)
    page = models[-most:] if is_backwards else models[:most]
    shown = [_described(state, model) for model in page]
    return ModelInfos.of(shown, has_more=len(page) < len(models))


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, caller: Caller, state: Shared) -> ModelInfo:
    """Describes one model."""
    return _described(state, await state.catalog.find(caller, model))


def _described(state: State, model: Model) -> ModelInfo:
    hello = state.link.hello
    positions = None if hello is None else hello.of(model.base_id).positions
    return ModelInfo(
        id=model.name,
        display_name=model.name,
        created_at=told_time(model.created),
        max_input_tokens=positions,
        max_tokens=positions,
    )
