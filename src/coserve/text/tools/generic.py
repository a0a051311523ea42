"""Templates without a format of their own: an answer that is JSON with a name and arguments is a call, as is
each further line."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, Syntax

GENERIC: Final = JsonCalls(
    "json",
    Syntax(before=f'{{"name": "{NAME}", "arguments": ', after="}", between="\n", anywhere=False),
)
