"""Chat completions that are stored."""

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from coserve.serve.answering.call import CallUsage
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, cut, json_reply, pieced, written
from coserve.serve.http.pages import page_reply
from coserve.serve.schema.chat import (
    ChatCompletion,
    ChatRequest,
    CompletionDeleted,
    CompletionList,
    CompletionUpdate,
    StoredMessages,
)
from coserve.serve.schema.common import MOST_METADATA, JsonObject
from coserve.serve.state import Shared, State
from coserve.serve.store.records import StoredChat, Tenant

_CHATS: Final = "/v1/chat/completions"
_ONE: Final = _CHATS + "/{completion_id}"
MOST_COMPLETIONS: Final = 100  # of one page, and messages
router = APIRouter(route_class=JsonRoute, tags=["Answers"])
Limit = Annotated[int, Query(ge=1, le=MOST_COMPLETIONS)]
Order = Literal["asc", "desc"]


def stored_chat(
    body: ChatRequest, tenant: str, made: Callable[[CallUsage], JsonObject], usage: CallUsage
) -> StoredChat:
    """The row of a completion, which `made` makes."""
    told = made(usage)
    messages = [
        {"id": f"{told['id']}-{place}", **message.model_dump(exclude_none=True)}
        for place, message in enumerate(body.messages)
    ]
    return StoredChat(
        told["id"], tenant, told["created"], told["model"], b"".join(written(told)).decode(),
        msgspec.json.encode(messages).decode(), body.metadata or {},
    )  # fmt: skip


@router.get(_CHATS, response_model=CompletionList, responses=error_responses(404), summary="List completions")
async def list_completions(
    request: Request,
    caller: Caller,
    state: Shared,
    after: Annotated[str | None, Query(description="The last completion of the page before.")] = None,
    limit: Limit = 20,
    order: Order = "asc",
    model: str | None = None,
) -> Response:
    """The caller's stored completions, the oldest first unless `order` says otherwise; with
    `metadata[KEY]=VALUE` those that have this entry."""
    page = await state.store.chats.page(caller.id, after, limit, order == "asc", model, _labels(request))
    return await page_reply(state, caller, page, after, lambda row: WrittenJson([_shown(row)]), _no_cursor)


@router.get(
    _ONE, response_model=ChatCompletion, responses=error_responses(404), summary="Retrieve a completion"
)
async def retrieve_completion(completion_id: str, caller: Caller, state: Shared) -> Response:
    """A completion that was made with `store`."""
    row = await _found(state, caller, completion_id)
    return await pieced(state.bodies, caller.id, cut(_shown(row)), "application/json")


@router.post(
    _ONE, response_model=ChatCompletion, responses=error_responses(404), summary="Change its metadata"
)
async def update_completion(
    completion_id: str, body: CompletionUpdate, caller: Caller, state: Shared
) -> Response:
    """Puts other metadata in place of a completion's own."""
    row = await state.store.chats.label(caller.id, completion_id, body.metadata or {})
    if row is None:
        raise _unknown(completion_id)
    return await pieced(state.bodies, caller.id, cut(_shown(row)), "application/json")


@router.delete(_ONE, responses=error_responses(404), summary="Delete a completion")
async def delete_completion(completion_id: str, caller: Caller, state: Shared) -> CompletionDeleted:
    """Deletes a completion with its messages."""
    if not await state.store.chats.remove(caller.id, completion_id):
        raise _unknown(completion_id)
    return CompletionDeleted(id=completion_id)


@router.get(
    _ONE + "/messages",
    response_model=StoredMessages,
    responses=error_responses(404),
    summary="List its messages",
)
async def list_messages(
    completion_id: str,
    caller: Caller,
    state: Shared,
    after: Annotated[str | None, Query(description="The last message of the page before.")] = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> Response:
    """The messages that a stored completion answers."""
    row = await _found(state, caller, completion_id)
    told = await state.bodies.run(caller.id, _page, row.messages, after, limit, order == "asc")
    return await json_reply(state.bodies, caller.id, told)


def _page(messages: str, after: str | None, limit: int, ascending: bool) -> JsonObject:
    """A page of messages. Raises ApiError 404 for an unknown cursor."""
    found: list[Any] = msgspec.json.decode(messages)[:: 1 if ascending else -1]
    left = iter(found)
    if after is not None and all(message["id"] != after for message in left):
        raise not_found(f"Message with id '{after}' not found.", "after")
    page = list(islice(left, limit))
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = next(left, None) is not None
    return {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more}


def _labels(request: Request) -> dict[str, str]:
    """The entries of metadata that a list's query asks for."""
    found = dict(_label(name, value) for name, value in request.query_params.items() if "[" in name)
    if len(found) > MOST_METADATA:
        message = f"At most {MOST_METADATA} entries of metadata may be asked for."
        raise ApiError(400, message, param="metadata", code="invalid_value")
    return found


def _label(name: str, value: str) -> tuple[str, str]:
    of, _, key = name.partition("[")
    key = key.removesuffix("]")
    if of != "metadata" or not key or any(letter in key for letter in '"\\\0') or len(key) > 64:
        raise ApiError(400, f"Unknown parameter: '{name[:256]}'.", param=name, code="unknown_parameter")
    return key, value


async def _found(state: State, caller: Tenant, id: str) -> StoredChat:
    row = await state.store.chats.get(caller.id, id)
    if row is None:
        raise _unknown(id)
    return row


def _no_cursor(after: str | None) -> ApiError:
    return not_found(f"Completion with id '{after}' not found.", "after")


def _unknown(id: str) -> ApiError:
    return not_found(f"Completion with id '{id}' not found.", "completion_id")


def _shown(row: StoredChat) -> bytes:
    """A completion as JSON, with its metadata."""
    return row.body.encode()[:-1] + b',"metadata":' + msgspec.json.encode(row.labels) + b"}"
