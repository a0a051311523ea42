"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>` and JSON."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, Syntax

HERMES: Final = JsonCalls(
    "hermes",
    Syntax(
        before=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
    ),
)
