"""DeepSeek: each call between control tokens of its own. V3 and R1 write JSON in a block of code, V3.1 after
the name."""

from typing import Final

from coserve.text.tools.json_calls import JsonCalls
from coserve.text.tools.syntax import NAME, Syntax

_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_END: Final = "<｜tool▁call▁end｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"

DEEPSEEK_V3: Final = JsonCalls(
    "deepseek_v3",
    Syntax(
        opening=_CALLS,
        before=f"{_CALL}function{_SEPARATOR}{NAME}\n```json\n",
        after=f"\n```{_END}",
        between="\n",
        closing=_ALL_END,
    ),
)
DEEPSEEK_V31: Final = JsonCalls(
    "deepseek_v31",
    Syntax(opening=_CALLS, before=f"{_CALL}{NAME}{_SEPARATOR}", after=_END, closing=_ALL_END),
)
