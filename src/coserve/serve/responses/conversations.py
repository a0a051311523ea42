"""`/v1/conversations`."""

from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter, Response

from coserve.serve.errors import ApiError, error_responses, not_found
from coserve.serve.http.auth import Caller
from coserve.serve.http.json_bodies import JsonRoute
from coserve.serve.http.json_replies import cut, pieced
from coserve.serve.responses.items import described, known_items, new_id, new_item_id, rows_of
from coserve.serve.responses.routes import After, Limit, Order, listed
from coserve.serve.responses.schema import (
    ConversationDeleted,
    ConversationItems,
    ConversationObject,
    ConversationRequest,
    ConversationUpdate,
    ItemList,
    KnownItem,
    ReferenceItem,
)
from coserve.serve.schema.common import JsonObject
from coserve.serve.state import Shared, State
from coserve.serve.store.records import ConversationRecord, ItemRecord, Page, Tenant

CONVERSATIONS: Final = "/v1/conversations"
_ONE: Final = CONVERSATIONS + "/{conversation_id}"
_ITEM: Final = _ONE + "/items/{item_id}"
router = APIRouter(route_class=JsonRoute, tags=["Conversations"])


@router.post(CONVERSATIONS, responses=error_responses(404), summary="Begin a conversation")
async def create_conversation(body: ConversationRequest, caller: Caller, state: Shared) -> ConversationObject:
    """Makes a list of items that responses go on with. It is kept until it is deleted."""
    row = ConversationRecord(new_id("conv"), caller.id, int(state.store.clock()), body.metadata or {})
    await state.store.conversations.add(row, await _rows(state, caller, row.id, body.items or ()))
    return _shown(row)


@router.get(_ONE, responses=error_responses(404), summary="Retrieve a conversation")
async def retrieve_conversation(conversation_id: str, caller: Caller, state: Shared) -> ConversationObject:
    """Describes a conversation."""
    return _shown(await _found(state, caller, conversation_id))


@router.post(_ONE, responses=error_responses(404), summary="Change a conversation's metadata")
async def update_conversation(
    conversation_id: str, body: ConversationUpdate, caller: Caller, state: Shared
) -> ConversationObject:
    """Puts other metadata in place of a conversation's own."""
    row = await state.store.conversations.label(caller.id, conversation_id, body.metadata or {})
    if row is None:
        raise _unknown(conversation_id)
    return _shown(row)


@router.delete(_ONE, responses=error_responses(404), summary="Delete a conversation")
async def delete_conversation(conversation_id: str, caller: Caller, state: Shared) -> ConversationDeleted:
    """Deletes a conversation. Responses that were made in it keep their items."""
    if not await state.store.conversations.remove(caller.id, conversation_id):
        raise _unknown(conversation_id)
    return ConversationDeleted(id=conversation_id)


@router.post(_ONE + "/items", response_model=ItemList, responses=error_responses(404), summary="Add items")
async def create_items(
    conversation_id: str, body: ConversationItems, caller: Caller, state: Shared
) -> Response:
    """Adds items to a conversation, each with a new id."""
    rows = await _rows(state, caller, conversation_id, body.items)
    if not await state.store.conversations.extend(caller.id, conversation_id, rows):
        raise _unknown(conversation_id)
    return await listed(state, caller, Page(tuple(rows), False), None)


@router.get(_ONE + "/items", response_model=ItemList, responses=error_responses(404), summary="List items")
async def list_items(
    conversation_id: str,
    caller: Caller,
    state: Shared,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """The items of a conversation, the newest first unless `order` says otherwise."""
    await _found(state, caller, conversation_id)
    page = await state.store.conversations.page(caller.id, conversation_id, after, limit, order == "asc")
    return await listed(state, caller, page, after)


@router.get(_ITEM, responses=error_responses(404), summary="Retrieve an item")
async def retrieve_item(conversation_id: str, item_id: str, caller: Caller, state: Shared) -> Response:
    """One item of a conversation."""
    item = await state.store.conversations.item(caller.id, conversation_id, item_id)
    if item is None:
        raise not_found(f"Item with id '{item_id}' not found.", "item_id")
    return await pieced(state.bodies, caller.id, cut(item.encode()), "application/json")


@router.delete(_ITEM, responses=error_responses(404), summary="Delete an item")
async def delete_item(
    conversation_id: str, item_id: str, caller: Caller, state: Shared
) -> ConversationObject:
    """Takes an item out of a conversation."""
    row = await _found(state, caller, conversation_id)
    if not await state.store.conversations.remove_item(caller.id, conversation_id, item_id):
        raise not_found(f"Item with id '{item_id}' not found.", "item_id")
    return _shown(row)


async def _rows(
    state: State, caller: Tenant, conversation: str, items: Sequence[KnownItem | JsonObject]
) -> list[ItemRecord]:
    named = [item.id for item in items if isinstance(item, ReferenceItem)]
    stored = await state.store.responses.named(caller.id, named) if named else {}

    def made() -> list[ItemRecord]:
        known = known_items(items, stored, state.settings.ignore_hosted_tools, "items")
        kept = [described(item, new_item_id(item.type)) for item in known]
        return rows_of(kept, caller.id, None, conversation, False)

    return await state.bodies.run(caller.id, made)


async def _found(state: State, caller: Tenant, id: str) -> ConversationRecord:
    row = await state.store.conversations.get(caller.id, id)
    if row is None:
        raise _unknown(id)
    return row


def _unknown(id: str) -> ApiError:
    return not_found(f"Conversation with id '{id}' not found.", "conversation_id")


def _shown(row: ConversationRecord) -> ConversationObject:
    return ConversationObject(id=row.id, created_at=row.created, metadata=row.labels)
