"""Parts of requests that only Anthropic's own service runs: tools of a server's, MCP servers, skills in
containers, edits of the context. They are refused by name, or left out where the server says so
(`ignore_hosted_tools`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from coserve.serve.anthropic.schema import MessageParam, MessagePrompt, kind_of
from coserve.serve.schema.unsupported import refusal, refuse_part, refuse_tool


def refuse_hosted(body: MessagePrompt) -> None:
    """Raises ApiError 400 for a body that asks for something that does not run here."""
    for tool in body.tools or ():
        if isinstance(tool, dict):
            refuse_tool(kind_of(tool))
    for name in ("mcp_servers", "compaction", "thread"):
        if getattr(body, name):
            raise refusal(name, name)
    if isinstance(body.container, Mapping) and body.container.get("skills"):
        raise refusal("container.skills", "container")
    if _clears(body.context_management):
        raise refusal("context_management", "context_management")
    for kind in _blocks(body.messages):
        refuse_part(kind)


def _clears(management: Mapping[str, Any] | None) -> bool:
    """Tells whether edits of the context are wanted that clear something. Claude Code sends one that keeps
    all."""
    edits = (management or {}).get("edits") or ()
    keeps = {"type": "clear_thinking_20251015", "keep": "all"}
    return not isinstance(edits, (list, tuple)) or any(edit != keeps for edit in edits)


def _blocks(messages: list[MessageParam]) -> Iterator[str]:
    """Types of hosted blocks, but for reasoning that only Anthropic can read, which is always left out."""
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, dict) and (kind := kind_of(block)) != "redacted_thinking":
                yield kind
