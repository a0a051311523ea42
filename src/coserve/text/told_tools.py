"""Tools and calls of them in words, for chat templates that leave them out: in the format `tools/generic.py`.

The tools are told in the chat's first message, an assistant's calls are its content, and what a tool gave is
a user's message. Messages stay as many as they were.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Turn = dict[str, Any]

# A chat with one call, whose texts no template has.
QUESTION: Final = "probe-question"
NAME: Final = "probe_function"
ARGUMENTS: Final = {"probe_key": "probe value"}
_PROPERTIES: Final = {"probe_key": {"type": "string", "description": "A value."}}
PARAMETERS: Final = {"type": "object", "properties": _PROPERTIES, "required": ["probe_key"]}
TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    {"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": PARAMETERS}},
)
CALLED: Final[Sequence[Mapping[str, Any]]] = (
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "probe0001", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
        ],
    },
)


def told(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The chat without tools, calls and the role `tool`."""
    found = [_told(turn, _names(turns)) for turn in turns]
    if tools and found:
        found[0] = {**found[0], "content": _joined(_introduced(tools), found[0].get("content"))}
    return found


def _introduced(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, whose parameters are JSON schemas:\n{listed}\nTo call functions, "
        "answer with a line for each of them and with nothing else: "
        '{"name": its name, "arguments": its arguments}'
    )


def _told(turn: Turn, names: Mapping[str, str]) -> Turn:
    if calls := turn.get("tool_calls"):
        own = {key: value for key, value in turn.items() if key != "tool_calls"}
        return {**own, "content": _joined(turn.get("content"), "\n".join(map(_called, calls)))}
    if turn["role"] != "tool":
        return turn
    name = turn.get("name") or names.get(str(turn.get("tool_call_id")), "the function")
    return {"role": "user", "content": _joined(f"{name} returned:", turn.get("content"))}


def _called(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):  # JSON otherwise, as OpenAI has it
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'


def _names(turns: Sequence[Turn]) -> dict[str, str]:
    """Names of called functions by the ids of calls."""
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    return {str(call["id"]): call.get("function", call)["name"] for call in calls if "id" in call}


def _joined(before: Any, after: Any) -> Any:
    """Two contents, one below the other; parts if one of them is."""
    if isinstance(before, list) or isinstance(after, list):
        return [*_parts(before), *_parts(after)]
    return "\n".join(text for text in (before, after) if text)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
