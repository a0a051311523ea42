"""Messages of chats and the tools that they name, as OpenAI's API has them, checked field by field.

Errors are DataErrors without a place; they name the message (from 1), the field, and what was expected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from coserve.errors import DataError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MOST_NESTED: Final = 32  # levels of a tool's parameters, a call's arguments, a reference
_FIELDS: Final = (
    "role", "content", "weight", "loss_weight", "name", "tool_calls", "tool_call_id", "function_call",
    "reasoning_content",
)  # fmt: skip
_MOST_QUOTED: Final = 60  # characters of a caller's value that an error repeats
_KINDS: Final = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number",
                 float: "a number", type(None): "null"}  # fmt: skip

Tools = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the assistant. `arguments` is an object by parameter, not its JSON."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; `role` is one of `ROLES`.

    A turn of the assistant is learned unless its `weight` is 0, and its content may be empty if it has
    `tool_calls`, and it may have its `reasoning` before both. A turn of a tool may have the `name` of the
    function and the `tool_call_id` it answers.
    """

    role: str
    content: str
    weight: int = 1
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None


def read_messages(value: object, field: str = "messages") -> tuple[Message, ...]:
    """The turns in `field` of a record. Raises DataError."""
    if not isinstance(value, list | tuple):
        raise DataError(f'expected "{field}" to be a list of objects; found {kind(value)}')
    turns = []
    for number, message in enumerate(value, 1):
        try:
            turns.append(_message(message))
        except DataError as error:
            place = f"message {number}" if field == "messages" else f'"{field}", message {number}'
            raise DataError(f"{place}: {error}") from None
    return tuple(turns)


def read_tools(value: Mapping[str, Any]) -> Tools:
    """The tools of a record: its "tools", or its older "functions", as a list of {"type": "function",
    "function": {"name", ...}}. Raises DataError."""
    tools, functions = value.get("tools"), value.get("functions")
    if tools and functions:
        raise DataError('expected "tools" or "functions", which is its older name; found both')
    field, found = ("tools", tools) if tools else ("functions", functions)
    if isinstance(found, str) and found.strip():  # files for ShareGPT hold JSON as text
        found = decode_json(found, field)
    if not found:
        return ()
    if not isinstance(found, list | tuple):
        raise DataError(f'expected "{field}" to be a list of objects; found {kind(found)}')
    return tuple(_tool(tool, field, number) for number, tool in enumerate(found, 1))


def text_of(value: Mapping[str, Any], key: str, may_be_empty: bool = False) -> str:
    """The text at `key`. Raises DataError for anything else, and for white space unless it may be empty."""
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f'expected "{key}" to be a string; found {kind(text)}')
    if not may_be_empty and not text.strip():
        raise DataError(f'expected "{key}" to hold text; found it empty')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f'expected "{key}" to be Unicode text; found half of a surrogate pair') from None
    return text


def kind(value: object) -> str:
    """The kind of a value, in JSON's words."""
    return _KINDS.get(type(value), type(value).__name__)


def quoted(value: object) -> str:
    """A caller's value, shortened, for an error."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else kind(value)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def decode_json(text: str, field: str) -> Any:
    """The value of JSON inside of a field. Raises DataError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise DataError(f'expected "{field}" to be JSON; {error}') from None


def check_whole(value: object, field: str) -> None:
    """Raises DataError where nested text is half of a surrogate pair, or nesting is deeper than `MOST_NESTED`
    levels, which recursive code bears."""
    _check_depth(value, field, MOST_NESTED)
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, msgspec.MsgspecError, TypeError, ValueError) as error:
        raise DataError(f'expected "{field}" to hold JSON; {error}') from None


def _check_depth(value: object, field: str, left: int) -> None:
    if left < 0:
        raise DataError(f'expected "{field}" to be nested {MOST_NESTED} deep at most')
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in inner:
        _check_depth(part, field, left - 1)


def _message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f'expected an object with "role" and "content"; found {kind(message)}')
    if "role" not in message:
        raise DataError('expected "role" and "content"; "role" is missing')
    role = "tool" if message["role"] == "function" else message["role"]  # its older name
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"expected the role to be one of {', '.join(ROLES)}; found {quoted(role)}")
    # Fields that a template might read, and this reader would drop, are refused.
    if unknown := [key for key in message if key not in _FIELDS and message[key] is not None]:
        raise DataError(f"expected only {_listed(_FIELDS)}; found {quoted(unknown[0])}")
    calls = _tool_calls(message) or _function_call(message)
    if message.get("content") is None and calls:
        content = ""
    elif "content" not in message:
        raise DataError('expected "role" and "content"; "content" is missing')
    else:
        content = content_of(message, may_be_empty=bool(calls) or role == "tool")
    names = {key: text_of(message, key) for key in ("name", "tool_call_id") if message.get(key) is not None}
    if "tool_call_id" in names and role != "tool":
        raise DataError(f'expected "tool_call_id" at the role "tool" only; found it at {role!r}')
    if message.get("reasoning_content") is not None:
        if role != "assistant":
            raise DataError(
                f'expected "reasoning_content" at the role "assistant" only; found it at {role!r}'
            )
        names["reasoning"] = text_of(message, "reasoning_content", may_be_empty=True)
    return Message(role, content, _weight(message), calls, **names)


def content_of(message: Mapping[str, Any], may_be_empty: bool = False) -> str:
    """The text at "content": a string, or a list of parts of text, joined as in requests. Raises DataError,
    also for parts of any other type."""
    parts = message["content"]
    if not isinstance(parts, list | tuple):
        return text_of(message, "content", may_be_empty)
    texts = [_part(part, f"content[{index}]") for index, part in enumerate(parts)]
    return text_of({"content": "".join(texts)}, "content", may_be_empty)


def _part(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise DataError(f'expected "{field}" to be an object with "type" and "text"; found {kind(part)}')
    if part.get("type") != "text":
        raise DataError(
            f'expected "{field}.type" to be "text", as training reads text alone; found '
            f"{quoted(part.get('type'))}: take such records out"
        )
    key = "text" if part.get("text") is not None else "value"  # another trainer's name
    if key not in part:
        raise DataError(f'expected "{field}" to have a "text"; it is missing')
    return text_of({f"{field}.{key}": part[key]}, f"{field}.{key}", may_be_empty=True)


def _weight(message: Mapping[str, Any]) -> int:
    """The weight of a message, which is that of its tokens: "loss_weight" is another trainer's name, and may
    be 0 at any role."""
    key = "weight" if message.get("weight") is not None else "loss_weight"
    weight, is_answer = message.get(key), message["role"] == "assistant"
    if weight is None:
        return 1
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise DataError(f'expected "{key}" to be 0 or 1; found {quoted(weight)}')
    if is_answer:
        return int(weight)
    above = key == "loss_weight"
    if weight or not above:
        raise DataError(
            f'expected {"a " * above}"{key}"{" above 0" * above} at the role "assistant" only; '
            f"found it at {message['role']!r}"
        )
    return 1


def _function_call(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The call of a message in the form before "tool_calls"."""
    call = message.get("function_call")
    if not call:
        return ()
    if message["role"] != "assistant":
        raise DataError(
            f'expected "function_call" at the role "assistant" only; found it at {message["role"]!r}'
        )
    if not isinstance(call, Mapping):
        raise DataError(
            f'expected "function_call" to be an object with "name" and "arguments"; found {kind(call)}'
        )
    return (made_call(call, "function_call"),)


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    if message["role"] != "assistant":
        raise DataError(
            f'expected "tool_calls" at the role "assistant" only; found it at {message["role"]!r}'
        )
    if not isinstance(calls, list | tuple):
        raise DataError(f'expected "tool_calls" to be a list of objects; found {kind(calls)}')
    return tuple(_tool_call(call, f"tool_calls[{index}]") for index, call in enumerate(calls))


def _tool_call(call: object, field: str) -> ToolCall:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise DataError(f'expected "{field}" to be an object with a "function"; found {kind(call)}')
    if call.get("type") not in (None, "function"):
        raise DataError(f'expected "{field}.type" to be "function"; found {quoted(call["type"])}')
    id = call.get("id")
    return made_call(call["function"], f"{field}.function", None if id is None else text_of(call, "id"))


def made_call(function: Mapping[str, Any], field: str, id: str | None = None) -> ToolCall:
    """The call in {"name", "arguments"}, whose arguments are an object or its JSON. Raises DataError."""
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f'expected "{field}.name" to hold text; found {quoted(name)}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decode_json(arguments, f"{field}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f'expected "{field}.arguments" to be an object; found {kind(arguments)}')
    check_whole({"name": name, "arguments": arguments}, field)
    return ToolCall(name, arguments, id)


def _tool(tool: object, field: str, number: int) -> Mapping[str, Any]:
    place = f"{field}[{number - 1}]"
    if not isinstance(tool, Mapping):
        raise DataError(f'expected "{place}" to be an object; found {kind(tool)}')
    if tool.get("type") not in (None, "function"):
        raise DataError(f'expected "{place}.type" to be "function"; found {quoted(tool["type"])}')
    function = tool.get("function", tool)  # "functions" and ShareGPT have the function itself
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f'expected "{place}" to be an object with a function that has a "name"')
    check_whole(tool, place)
    described = {key: value for key, value in function.items() if key != "type" or function is not tool}
    return {"type": "function", "function": described}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
