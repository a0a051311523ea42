"""Calls whose arguments are a JSON object, with any texts around them."""

import re
from dataclasses import dataclass
from typing import Final

from coserve.text.tools.format import ArgumentReader, random_id, with_object
from coserve.text.tools.lark import Lark
from coserve.text.tools.syntax import Syntax
from coserve.text.tools.tool import Tool

_IN_STRING: Final = re.compile(r'["\\]')
_OUTSIDE: Final = re.compile(r'["{}\[\]]')


class JsonObject:
    """Finds the end of a JSON object in text that arrives in pieces. It counts brackets outside of strings,
    and does not check the rest."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`. Where no object begins, it is over at once; white space may be before it."""
        if not self._depth:
            text = text.lstrip()
            if not text.startswith("{"):
                return "", text or None
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                break
            place = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._is_escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        return text[:place], text[place:]
        return text, None

    def finish(self) -> str:
        """See `ArgumentReader`: nothing is held back."""
        return ""


@dataclass(frozen=True)
class JsonCalls:
    """A format whose arguments are a JSON object; ids of calls have `id_length` random characters after
    `id_prefix`."""

    name: str
    syntax: Syntax
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        """See `ToolFormat`."""
        return self.id_prefix + random_id(self.id_length)

    def arguments(self, tool: Tool) -> ArgumentReader:
        """See `ToolFormat`."""
        return JsonObject()

    def grammar(self, lark: Lark, tool: Tool) -> str:
        """See `ToolFormat`."""
        return lark.json(with_object(tool.parameters), tool.strict)
