"""`/v1/responses`."""

from collections.abc import AsyncGenerator
from time import time
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from coserve.core.request import SamplingParams
from coserve.serve.answering.answers import answer
from coserve.serve.answering.call import CallUsage
from coserve.serve.answering.replies import whole_answers
from coserve.serve.answering.request_builder import RequestBuilder
from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import WrittenJson, cut, pieced
from coserve.serve.http.pages import page_reply
from coserve.serve.http.streams import ClientGone, EventStream, unless_gone
from coserve.serve.responses.background import InBackground, ResponseRuns
from coserve.serve.responses.events import replayed, usage_of
from coserve.serve.responses.items import new_id, new_item_id, sealed
from coserve.serve.responses.schema import (
    MOST_LISTED,
    CompactedObject,
    CompactRequest,
    CountRequest,
    InputTokens,
    ItemList,
    MessageItem,
    ResponseDeleted,
    ResponseObject,
    ResponseRequest,
)
from coserve.serve.responses.work import called, composed, prepared, replied
from coserve.serve.schema.common import tier_of
from coserve.serve.state import Shared, State
from coserve.serve.store.records import ItemRecord, Page, ResponseRecord, Tenant
from coserve.serve.store.responses import UNDER_WAY
from coserve.text.deltas import TextDelta

RESPONSES: Final = "/v1/responses"
COMPACT: Final = "/v1/responses/compact"
COUNT: Final = "/v1/responses/input_tokens"
_SUMMARIZE: Final = (
    "Summarize this conversation for somebody who goes on with it and has not read it: what was asked, what "
    "was found and decided, what is left to do."
)
router = APIRouter(route_class=JsonRoute, tags=["Responses"])
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(description="The last item of the page before.")]


@router.post(
    RESPONSES, response_model=ResponseObject, responses=error_responses(404, 500), summary="Make a response"
)
async def create_response(
    body: ResponseRequest, request: Request, caller: Caller, state: Shared, background: InBackground
) -> Response:
    """Answers a message or items, whole or (`stream`) as server-sent events, and keeps the response unless
    `store` is false.

    With `background` the answer goes on without its client, whatever process ends meanwhile.
    """
    if body.background:
        background.check(caller.id)
    work = await prepared(state, caller, body)
    if not body.background:
        return await replied(request, state, work, bool(body.stream))
    await background.begin(work)
    assert work.row is not None
    if body.stream:
        return _stream(state, background, work.row, -1)
    return Response(work.row.body, media_type="application/json")


@router.post(COMPACT, responses=error_responses(404, 500), summary="Summarize a conversation")
async def compact_response(
    body: CompactRequest, request: Request, caller: Caller, state: Shared
) -> CompactedObject:
    """Has the model summarize a conversation. The output takes its place as the input of further requests."""
    tier = tier_of(body.service_tier)
    builder = await RequestBuilder.of(state, caller, body.model, "resp_", tier=tier)
    asked = [*body.items, MessageItem(role="user", content=_SUMMARIZE)]
    made = await composed(state, caller, body.model_copy(update={"input": asked}))
    call = await called(builder, made, SamplingParams(), None)
    try:
        (whole,) = await unless_gone(request.receive, whole_answers(answer(state, call), 1))
    except ClientGone as error:
        raise ApiError(400, "The client has left.") from error
    said = call.markup.reader().push(whole.text, True)
    summary = "".join(delta.text for delta in said if isinstance(delta, TextDelta)).strip()
    item = {"id": new_item_id("compaction"), "type": "compaction", "encrypted_content": sealed(summary)}
    usage = usage_of(CallUsage.of(call, len(whole.tokens), [whole.cached]))
    return CompactedObject.model_validate(
        {"id": new_id("resp"), "created_at": int(time()), "output": [item], "usage": usage}
    )


@router.post(COUNT, responses=error_responses(404), summary="Count a request's tokens")
async def count_input_tokens(body: CountRequest, caller: Caller, state: Shared) -> InputTokens:
    """Tells the number of tokens that a request has, with the beginning of the answer's turn."""
    builder = await RequestBuilder.of(state, caller, body.model)
    made = await composed(state, caller, body)
    return InputTokens(input_tokens=len(await builder.chat_tokens(made.chat)))


@router.get(
    RESPONSES + "/{response_id}",
    response_model=ResponseObject,
    responses=error_responses(404),
    summary="Retrieve a response",
)
async def retrieve_response(
    response_id: str,
    caller: Caller,
    state: Shared,
    background: InBackground,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, le=2**31, description="The last event that came.")] = -1,
    include_obfuscation: Annotated[bool, Query(description="Accepted; events are never padded.")] = False,
) -> Response:
    """A response that is kept, or (`stream`) its events. Those of one that is under way come when it has
    ended."""
    row = await _found(state, caller, response_id)
    if stream:
        return _stream(state, background, row, starting_after)
    return await pieced(
        state.bodies, caller.id, cut((await background.body(row)).encode()), "application/json"
    )


@router.delete(RESPONSES + "/{response_id}", responses=error_responses(404), summary="Delete a response")
async def delete_response(
    response_id: str, caller: Caller, state: Shared, background: InBackground
) -> ResponseDeleted:
    """Deletes a response, and its items but for those in a conversation. One that is under way is cancelled
    first. Responses that went on with it cannot be gone on with any more."""
    await background.cancel(await _found(state, caller, response_id))
    await state.store.responses.remove(caller.id, response_id)
    return ResponseDeleted(id=response_id)


@router.post(
    RESPONSES + "/{response_id}/cancel",
    response_model=ResponseObject,
    responses=error_responses(404),
    summary="Cancel a response",
)
async def cancel_response(
    response_id: str, caller: Caller, state: Shared, background: InBackground
) -> Response:
    """Ends a response in the background; one that has ended stays as it is."""
    row = await _found(state, caller, response_id)
    await background.cancel(row)
    row = await _found(state, caller, response_id)
    if not msgspec.json.decode(row.body)["background"]:
        message = "Only a response in the background can be cancelled; others end with their connection."
        raise ApiError(400, message, param="response_id", code="invalid_value")
    return Response(row.body, media_type="application/json")


@router.get(
    RESPONSES + "/{response_id}/input_items",
    response_model=ItemList,
    responses=error_responses(404),
    summary="List a response's input",
)
async def list_input_items(
    response_id: str,
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """The items of a response's own request; those of the responses before it are theirs."""
    await _found(state, caller, response_id)
    page = await state.store.responses.page(caller.id, response_id, after, limit, order == "asc")
    return await listed(state, caller, page, after)


async def listed(state: State, caller: Tenant, page: Page[ItemRecord] | None, after: str | None) -> Response:
    """A page of items. Raises ApiError 404 for an unknown cursor."""
    return await page_reply(
        state, caller, page, after, lambda row: WrittenJson([row.item.encode()]), _unknown_item
    )


def _unknown_item(after: str | None) -> ApiError:
    return not_found(f"Item with id '{after}' not found.", "after")


async def _found(state: State, caller: Tenant, id: str) -> ResponseRecord:
    row = await state.store.responses.get(caller.id, id)
    if row is None:
        raise not_found(f"Response with id '{id}' not found.", "response_id")
    return row


def _stream(state: State, background: ResponseRuns, row: ResponseRecord, after: int) -> EventStream:
    events = _followed(state, background, row, after)
    return EventStream(events, events)


async def _followed(
    state: State, background: ResponseRuns, row: ResponseRecord, after: int
) -> AsyncGenerator[bytes, None]:
    """The events of a response that have a higher number than `after`."""
    told = after + 1
    while True:
        for event in (await state.bodies.run(row.tenant, replayed, row.body.encode()))[told:]:
            yield event
            told += 1
        if row.status not in UNDER_WAY:
            return
        await background.wait(row.id)
        found = await state.store.responses.get(row.tenant, row.id)
        if found is None or found.status in UNDER_WAY:  # deleted, or the server ends
            return
        row = found
