"""Llama 3.1 to 3.3: an answer that is JSON is a call. `<|python_tag|>` before it is passed over; grammars do
not write it."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, Syntax

LLAMA3: Final = JsonCalls(
    "llama3_json",
    Syntax(
        before=f'{{"name": "{NAME}", "parameters": ',
        after="}",
        between="; ",
        anywhere=False,
        skipped="<|python_tag|>",
    ),
)
