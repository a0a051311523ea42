"""Conversations of ShareGPT: turns of {"from", "value"}."""

from collections.abc import Mapping
from typing import Any, Final

from coserve.errors import DataError
from coserve.jobs.messages import Message, decode_json, kind, made_call, quoted, read_messages, text_of

_ROLES: Final = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bard": "assistant", "bing": "assistant", "assistant": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip


def read_turns(value: object, field: str) -> tuple[Message, ...]:
    """The turns in `field` of a record, in this format where one has "from", else {"role", "content"}. Raises
    DataError."""
    turns = value if isinstance(value, list | tuple) else ()
    keys = [turn.keys() for turn in turns if isinstance(turn, Mapping)]
    is_ours = any("from" in one for one in keys) and not any("role" in one for one in keys)
    return read_conversations(value, field) if is_ours else read_messages(value, field)


def read_conversations(value: object, field: str = "conversations") -> tuple[Message, ...]:
    """The turns in "conversations". Some files have {"role", "content"} under this name, which is read too.
    Raises DataError."""
    if not isinstance(value, list | tuple):
        raise DataError(f'expected "{field}" to be a list of objects; found {kind(value)}')
    if any(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return read_messages(value, field)
    turns = []
    for number, turn in enumerate(value, 1):
        try:
            turns.append(_turn(turn))
        except DataError as error:
            raise DataError(f'"{field}", message {number}: {error}') from None
    return tuple(turns)


def _turn(turn: object) -> Message:
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        raise DataError(f'expected an object with "from" and "value"; found {_found(turn)}')
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise DataError(f'expected "from" to be one of {", ".join(_ROLES)}; found {quoted(speaker)}')
    if speaker == "function_call":
        text = text_of(turn, "value")
        calls = decode_json(text, "value")
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, Mapping) for call in calls):
            raise DataError('expected "value" to be the JSON of an object with "name" and "arguments"')
        made = tuple(made_call(call, "value") for call in calls)
        return Message("assistant", "", _weight(turn, "assistant"), made)
    role = _ROLES[speaker]
    return Message(role, text_of(turn, "value", may_be_empty=role == "tool"), _weight(turn, role))


def _weight(turn: Mapping[str, Any], role: str) -> int:
    """0 or 1. Files of this format may state it at every turn; only the assistant's counts."""
    weight = turn.get("weight")
    if weight is None:
        return 1
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise DataError(f'expected "weight" to be 0 or 1; found {quoted(weight)}')
    return int(weight) if role == "assistant" else 1


def _found(turn: object) -> str:
    return ", ".join(quoted(key) for key in list(turn)[:8]) if isinstance(turn, Mapping) else kind(turn)
