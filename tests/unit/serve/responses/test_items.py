"""Items of responses as turns of a chat, against turns that are taken apart again."""

import json
import random
import secrets
from itertools import pairwise
from typing import Any

import pytest

from coserve.jobs.messages import Message
from coserve.serve.errors import ApiError
from coserve.serve.responses.items import described, known_items, messages_of, opened, read_item, sealed
from coserve.serve.responses.schema import ResponseRequest

_ORDER = ("reasoning", "text", "call")  # of the parts of a turn of the assistant


def drawn(draw: random.Random) -> list[dict[str, Any]]:
    """Items of any kind, whose texts are all different."""
    items, calls = list[dict[str, Any]](), list[str]()
    for number in range(draw.randint(1, 12)):
        kind = draw.choice(("user", "assistant", "developer", "reasoning", "call", "call", "output"))
        if kind == "reasoning":
            part = [{"type": "reasoning_text", "text": f"t{number}"}]
            sealed_part = {"encrypted_content": sealed(f"t{number}")}
            items.append({"type": kind, "summary": [], **draw.choice(({"content": part}, sealed_part))})
        elif kind == "call":
            calls.append(f"c{number}")
            arguments = json.dumps({"n": number})
            items.append({"type": "function_call", "call_id": calls[-1], "name": "f", "arguments": arguments})
        elif kind == "output" and calls:
            items.append(
                {"type": "function_call_output", "call_id": draw.choice(calls), "output": f"o{number}"}
            )
        else:
            role = "user" if kind == "output" else kind
            items.append({"role": role, "content": f"m{number}"})
    return items


def parts(turn: Message) -> list[tuple[str, Any]]:
    """The parts of a turn, each of which an item has made."""
    if turn.role != "assistant":
        return [(turn.role, turn.content)]
    found: list[tuple[str, Any]] = []
    if turn.reasoning is not None:
        found.append(("reasoning", turn.reasoning))
    if turn.content:
        found.append(("text", turn.content))
    return found + [("call", (call.id, call.arguments["n"])) for call in turn.tool_calls]


def part_of(item: dict[str, Any]) -> tuple[str, Any]:
    """The part of a turn that an item makes."""
    match item.get("type", "message"):
        case "reasoning":
            given = item.get("content")
            return "reasoning", given[0]["text"] if given else opened(item["encrypted_content"])
        case "function_call":
            return "call", (item["call_id"], json.loads(item["arguments"])["n"])
        case "function_call_output":
            return "tool", item["output"]
    return "text" if item["role"] == "assistant" else item["role"], item["content"]


def test_turns_hold_all_items_in_their_order_and_are_as_few_as_can_be() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw, most = random.Random(seed), 0
    for _ in range(300):
        items = drawn(draw)
        body = ResponseRequest(model="m", input=items)  # type: ignore[arg-type]
        known = list(known_items(body.items, {}, False))
        turns = messages_of(known, "Be brief.")
        assert (turns[0].role, turns[0].content) == ("system", "Be brief.")
        found = [parts(turn) for turn in turns[1:]]
        assert [part for turn in found for part in turn] == [part_of(item) for item in items]
        for one, other in pairwise(found):
            last, first = one[-1][0], other[0][0]
            if last in _ORDER and first in _ORDER:
                assert _ORDER.index(first) <= _ORDER.index(last) and (first, last) != ("call", "call")
        most = max(most, *map(len, found))
        # As they are kept, items are the same turns.
        kept = [read_item(json.dumps(described(item, f"id{n}"))) for n, item in enumerate(known)]
        assert messages_of(kept, "Be brief.") == turns
    assert most > 3


def test_a_result_needs_its_call_before_it() -> None:
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1", "output": "x"}
    body = ResponseRequest(model="m", input=[result, call])
    with pytest.raises(ApiError, match="No function call found"):
        messages_of(list(known_items(body.items, {}, False)), None)


def test_what_another_server_sealed_is_no_text() -> None:
    assert opened(sealed("Ünï ✓")) == "Ünï ✓"
    for foreign in ("gAAAAABo é", "abc", "____", "!"):
        assert opened(foreign) is None
