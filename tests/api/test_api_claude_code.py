"""A session of Claude Code by the requests that it sends, as its documentation and recordings tell."""

import json
from collections.abc import Callable
from typing import Any

from test_api_messages import events_of
from test_api_tools import engine_of, folders, say

from serving import Play, World

__all__ = ["folders"]
PATH = "/v1/messages?beta=true"
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/2.1.90 (external, cli)", "x-app": "cli", "x-stainless-lang": "js",
}  # fmt: skip
CACHED: Any = {"type": "ephemeral", "ttl": "1h"}
SYSTEM: Any = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.90"},
    {"type": "text", "text": "You are Claude Code.", "cache_control": {**CACHED, "scope": "global"}},
    {"type": "text", "text": "# Environment", "cache_control": CACHED},
]
TOOLS: Any = [
    {
        "name": name, "description": f"{name}s.", "eager_input_streaming": True,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {field: {"type": "string", "description": field}}, "required": [field],
            "additionalProperties": False,
        },
    }
    for name, field in (("Bash", "command"), ("Read", "file_path"))
]  # fmt: skip
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


def asked(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "max_tokens": 900, "stream": True, "system": SYSTEM, "tools": TOOLS,
        "messages": messages, "metadata": {"user_id": json.dumps({"device_id": "a", "session_id": "b"})},
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, **fields,
    }  # fmt: skip


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events come in the order that the API's reference has: blocks one after
    the other, each with deltas of its own kind, a signature as the last of a thought, then the end."""
    events = [event for event in events if event["type"] != "ping"]
    (first, *blocks, delta, last), made = events, list[dict[str, Any]]()
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    assert first["message"]["content"] == [] and first["message"]["role"] == "assistant"
    current, text, opened, signed = dict[str, Any](), "", False, False
    for event in blocks:
        assert event["index"] == len(made)
        match event["type"]:
            case "content_block_start":
                assert not opened
                current, text, opened, signed = dict(event["content_block"]), "", True, False
            case "content_block_delta":
                told = event["delta"]
                kind = {"text": "text_delta", "tool_use": "input_json_delta"}.get(current["type"])
                assert opened and not signed
                if current["type"] == "thinking":
                    signed = told["type"] == "signature_delta"
                    if signed:
                        current["signature"] = told["signature"]
                        continue
                    kind = "thinking_delta"
                assert told["type"] == kind
                text += told[{"thinking": "thinking", "text": "text"}.get(current["type"], "partial_json")]
            case "content_block_stop":
                assert opened and (signed or current["type"] != "thinking")
                opened = False
                if current["type"] == "tool_use":
                    current["input"] = json.loads(text)
                else:
                    current[current["type"]] = text
                made.append(current)
            case other:
                raise AssertionError(other)
    assert not opened
    return {**first["message"], "content": made, **delta["delta"]}


def test_what_claude_code_asks(play: Play, folders: Callable[..., str]) -> None:
    """It looks whether it may ask, counts, has a title made, and sends its whole history each time."""
    folder = folders("hermes", True)

    async def story(world: World) -> None:
        async def post(body: dict[str, Any], path: str = PATH) -> Any:
            answer = await world.http.post(path, json=body, headers=HEADERS)
            assert answer.status_code == 200, answer.text
            return answer

        say(world, "quota")
        quota = [{"role": "user", "content": "quota"}]
        probe = (await post({"model": "tiny", "max_tokens": 1, "messages": quota, "metadata": {}})).json()
        assert probe["stop_reason"] == "max_tokens"
        counted = {"model": "tiny", "messages": [{"role": "user", "content": "foo"}], "tools": TOOLS}
        assert (await post(counted, "/v1/messages/count_tokens?beta=true")).json()["input_tokens"] > 20
        say(world, '{"title":"ls"}')  # thinking is disabled, and the template reads that
        title = {"effort": "low", "format": {"type": "json_schema", "schema": TITLE}}
        history: list[dict[str, Any]] = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                    {"type": "text", "text": "ls?", "cache_control": CACHED},
                ],
            }
        ]
        body = asked(history, tools=[], thinking={"type": "disabled"}, output_config=title)
        said = message_of(events_of((await post(body)).text))
        assert json.loads(said["content"][-1]["text"]) == {"title": "ls"}
        assert "title" in (world.submits()[-1].sampling.grammar or "")

        call = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
        say(world, f"List.\n</think>\n\nI look.\n{call}")
        first = message_of(events_of((await post(asked(history))).text))
        assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
        assert first["stop_reason"] == "tool_use" and first["content"][2]["input"] == {"command": "ls"}
        result = {
            "type": "tool_result", "tool_use_id": first["content"][2]["id"], "is_error": False,
            "content": [{"type": "text", "text": "a.py"}], "cache_control": CACHED,
        }  # fmt: skip
        reminder = {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"}
        history += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, reminder]},
        ]
        say(world, "</think>There is a.py.")
        last = message_of(events_of((await post(asked(history))).text))
        assert (last["content"][-1]["text"], last["stop_reason"]) == ("There is a.py.", "end_turn")
        prompt = world.state.text.tokenizer.decode(list(world.submits()[-1].prompt))
        places = [prompt.index(one) for one in ("You are Claude Code.", "ls?", "I look.", "a.py", "Go on.")]
        assert places == sorted(places)

    play(story, engine=engine_of(folder), model=folder)
