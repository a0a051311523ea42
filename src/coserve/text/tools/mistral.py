"""Mistral: a list of JSON after `[TOOL_CALLS]`, or since 2025 each call after it with its name outside of the
JSON. Templates take ids of nine letters and digits only, and write them into the list."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, Syntax

_ID: Final = r'(?:\s{0,16},\s{0,16}"id"\s{0,16}:\s{0,16}"[a-zA-Z0-9]{0,64}")?'
_ID_LENGTH: Final = 9

MISTRAL: Final = JsonCalls(
    "mistral",
    Syntax(
        opening="[TOOL_CALLS] [",
        before=f'{{"name": "{NAME}", "arguments": ',
        after="}",
        between=", ",
        closing="]",
        reads_after=rf"{_ID}\s{{0,16}}\}}",
    ),
    id_prefix="",
    id_length=_ID_LENGTH,
)
MISTRAL_NAMES: Final = JsonCalls(
    "mistral_names",
    Syntax(before=f"[TOOL_CALLS]{NAME}[ARGS]", after=""),
    id_prefix="",
    id_length=_ID_LENGTH,
)
