"""The interface of a format of calls."""

import secrets
import string
from collections.abc import Mapping
from typing import Any, Protocol

from coserve.text.tools.lark import Lark
from coserve.text.tools.syntax import Syntax
from coserve.text.tools.tool import Tool

_LETTERS = string.ascii_letters + string.digits


class ArgumentReader(Protocol):
    """Reads the arguments of one call from text that arrives in pieces, which begins right after
    `Syntax.before`."""

    def push(self, text: str) -> tuple[str, str | None]:
        """(JSON of the arguments that `text` completes, the text after them); None as long as they go on."""
        ...

    def finish(self) -> str:
        """The JSON that was held back, where the answer ends within the arguments."""
        ...


class ToolFormat(Protocol):
    """A format that a model writes its calls in."""

    @property
    def name(self) -> str:
        """The name of the format in settings."""
        ...

    @property
    def syntax(self) -> Syntax:
        """The texts around its calls."""
        ...

    def new_id(self) -> str:
        """A new id of a call, as the templates of this format take them."""
        ...

    def arguments(self, tool: Tool) -> ArgumentReader:
        """A reader of the arguments of one call of a tool."""
        ...

    def grammar(self, lark: Lark, tool: Tool) -> str:
        """An expression in `lark` for the arguments of a tool. Raises DataError where its schema cannot be
        written in this format."""
        ...


def random_id(length: int) -> str:
    """Random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


def with_object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's parameters with its type, as clients leave that out."""
    return {"type": "object", **parameters}
