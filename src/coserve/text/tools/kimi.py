"""Kimi K2: each call between control tokens, with a name that is numbered through the whole chat."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, NUMBER, Syntax

KIMI: Final = JsonCalls(
    "kimi_k2",
    Syntax(
        opening="<|tool_calls_section_begin|>",
        before=f"<|tool_call_begin|>functions.{NAME}:{NUMBER}<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)
