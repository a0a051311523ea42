"""Items: as they are kept, and as turns of a chat."""

import base64
import binascii
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from pydantic import TypeAdapter

from coserve.errors import DataError
from coserve.jobs.messages import Message, made_call
from coserve.serve.errors import ApiError, not_found
from coserve.serve.responses.schema import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    KnownItem,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    said,
)
from coserve.serve.schema.common import JsonObject
from coserve.serve.store.records import ItemRecord

_PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_SUMMARY: Final = "Summary of the conversation so far:\n\n"
# Parts of one turn of the assistant, in the order in which a template writes them.
_THOUGHT, _TEXT, _CALL = 1, 2, 3
_kept: Final = TypeAdapter[KnownItem | JsonObject](Item)


def new_id(kind: str) -> str:
    """A new id such as `resp_0f3a…`; `kind` is the part before the underscore."""
    return f"{kind}_{secrets.token_hex(24)}"


def new_item_id(kind: str) -> str:
    """A new id for an item of this type."""
    return new_id(_PREFIXES[kind])


def sealed(text: str) -> str:
    """A text as `encrypted_content`, which clients hand back as it is. It is base64, and hides nothing."""
    return base64.urlsafe_b64encode(text.encode()).decode()


def opened(content: str) -> str | None:
    """The text of an `encrypted_content`; None for one of another server."""
    try:
        return base64.b64decode(content, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def described(item: KnownItem, id: str) -> JsonObject:
    """An item of a request as it is kept and listed."""
    match item:
        case MessageItem(role=role, content=content):
            of_answer = role == "assistant"
            part: JsonObject = {"type": "output_text" if of_answer else "input_text", "text": said(content)}
            fields: JsonObject = {
                "role": role,
                "content": [{**part, "annotations": []} if of_answer else part],
            }
        case FunctionCallItem():
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionOutputItem():
            fields = {"call_id": item.call_id, "output": said(item.output)}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            fields = {"summary": summary, "content": [{"type": "reasoning_text", "text": thought_of(item)}]}
        case CompactionItem():
            return {"id": id, "type": "compaction", "encrypted_content": item.encrypted_content}
        case ReferenceItem():
            raise AssertionError("references have been resolved")
    return {"id": id, "type": item.type, "status": "completed", **fields}


def thought_of(item: ReasoningItem) -> str:
    """The text of reasoning; empty for that of another server."""
    if item.content:
        return "".join(part.text for part in item.content)
    return opened(item.encrypted_content or "") or ""


def known_items(
    given: Sequence[KnownItem | JsonObject], stored: Mapping[str, str], ignores: bool, param: str = "input"
) -> Iterator[KnownItem]:
    """The items of a request, with what references refer to in `stored`, as JSON by id. Items of other types
    are left out where the server `ignores` these. Raises ApiError."""
    for index, item in enumerate(given):
        if isinstance(item, ReferenceItem):
            if item.id not in stored:
                raise not_found(f"Item with id '{item.id}' not found.", f"{param}.{index}")
            yield read_item(stored[item.id])
        elif not isinstance(item, dict):
            yield item
        elif not ignores:
            kind = str(item.get("type"))[:256]
            message = f"Items of type '{kind}' are not supported by this server."
            raise ApiError(400, message, param=f"{param}.{index}", code="unsupported_parameter")


def read_item(text: str) -> KnownItem:
    """An item that was kept."""
    item = _kept.validate_python(msgspec.json.decode(text))
    assert not isinstance(item, dict)
    return item


def rows_of(
    items: Sequence[JsonObject], tenant: str, response: str | None, conversation: str | None, output: bool
) -> list[ItemRecord]:
    """Rows of items of a response, or of a conversation alone."""
    return [
        ItemRecord(item["id"], tenant, msgspec.json.encode(item).decode(), response, conversation, output)
        for item in items
    ]


def messages_of(items: Sequence[KnownItem], instructions: str | None) -> list[Message]:
    """The turns of a chat. Reasoning, text and calls of the assistant that follow each other in this order
    are one turn. Raises ApiError 400."""
    found, stage = list[Message](), 0
    calls = set[str]()
    if instructions is not None:
        found.append(Message("system", instructions))
    for index, item in enumerate(items):
        if isinstance(item, FunctionOutputItem) and item.call_id not in calls:
            message = f"No function call found for the output of the call '{item.call_id}'."
            raise ApiError(400, message, param="input", code="invalid_value")
        if isinstance(item, FunctionCallItem):
            calls.add(item.call_id)
        try:
            part = _part(item, index)
        except DataError as error:
            raise ApiError(400, str(error), param="input", code="invalid_value") from error
        if part is None:
            continue
        turn, place = part
        if place and stage and (place > stage or place == stage == _CALL):
            found[-1] = _joined(found[-1], turn)
        else:
            found.append(turn)
        stage = place
    return found


def _part(item: KnownItem, index: int) -> tuple[Message, int] | None:
    """A turn of an item, and its place in one of the assistant's (0: in none); None for one without text."""
    match item:
        case MessageItem(role=role, content=content):
            return Message(role, said(content)), _TEXT if role == "assistant" else 0
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = made_call(function, f"input[{index}]", item.call_id)
            return Message("assistant", "", tool_calls=(call,)), _CALL
        case FunctionOutputItem():
            return Message("tool", said(item.output), tool_call_id=item.call_id), 0
        case ReasoningItem():
            thought = thought_of(item)
            return (Message("assistant", "", reasoning=thought), _THOUGHT) if thought else None
        case CompactionItem():
            summary = opened(item.encrypted_content)
            if summary is None:
                raise DataError(f"input[{index}] is a compaction of another server, which cannot be read")
            return Message("user", _SUMMARY + summary), 0
        case _:
            raise AssertionError("references have been resolved")


def _joined(first: Message, second: Message) -> Message:
    return Message(
        "assistant",
        first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning=first.reasoning,
    )
