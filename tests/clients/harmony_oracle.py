"""Chats as OpenAI's own harmony library renders them, and answers as it reads them; in the clients'
environment, without coserve. JSON comes in and goes out."""

import json
import sys
from typing import Any

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    ToolDescription,
    load_harmony_encoding,
)

given = json.load(sys.stdin)
encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def described(tool: dict[str, Any]) -> ToolDescription:
    function = tool["function"]
    if not function["parameters"].get("properties"):
        return ToolDescription.new(function["name"], function.get("description", ""))
    return ToolDescription.new(function["name"], function.get("description", ""), function.get("parameters"))


def said(turn: dict[str, Any], called: list[str]) -> list[Message]:
    """The messages that a turn of a chat is; `called` are functions that were called so far."""
    content = turn.get("content") or ""
    if turn["role"] == "user":
        return [Message.from_role_and_content(Role.USER, content)]
    if turn["role"] == "tool":
        author = Author.new(Role.TOOL, f"functions.{called[-1]}")
        written = json.dumps(content, ensure_ascii=False)
        made = Message.from_author_and_content(author, written)
        return [made.with_channel("commentary").with_recipient("assistant")]
    found = []
    if thought := turn.get("reasoning_content"):
        found.append(Message.from_role_and_content(Role.ASSISTANT, thought).with_channel("analysis"))
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        called.append(function["name"])
        written = json.dumps(function["arguments"], ensure_ascii=False)
        made = Message.from_role_and_content(Role.ASSISTANT, written).with_channel("commentary")
        made = made.with_recipient(f"functions.{function['name']}")
        found.append(made.with_content_type("json"))
    if not turn.get("tool_calls"):
        found.append(Message.from_role_and_content(Role.ASSISTANT, content).with_channel("final"))
    return found


def prompt(chat: dict[str, Any]) -> str:
    system = SystemContent.new().with_conversation_start_date(given["date"])
    system = system.with_reasoning_effort(ReasoningEffort(chat["effort"].title()))
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    turns, tools, called = chat["messages"], chat["tools"], list[str]()
    developer = DeveloperContent.new()
    if is_told := turns[0]["role"] in ("system", "developer"):
        developer = developer.with_instructions(turns[0]["content"])
    if tools:
        developer = developer.with_function_tools([described(tool) for tool in tools])
    if is_told or tools:
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    for turn in turns[is_told:]:
        messages += said(turn, called)
    conversation = Conversation.from_messages(messages)
    tokens = encoding.render_conversation_for_completion(conversation, Role.ASSISTANT)
    return encoding.decode_utf8(tokens)


def read(answer: str) -> list[dict[str, str | None]]:
    tokens = encoding.encode(answer, allowed_special="all")
    return [
        {"channel": one.channel, "to": one.recipient, "text": "".join(part.text for part in one.content)}
        for one in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    ]


json.dump({"prompts": [*map(prompt, given["chats"])], "answers": [*map(read, given["answers"])]}, sys.stdout)
