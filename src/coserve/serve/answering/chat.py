"""A chat that is to be answered, in no dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coserve.serve.answering.structure import Structure
from coserve.text.chat import texts_of
from coserve.text.rendering import Tools, Turns
from coserve.text.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns with a role and a content, as templates take them. The template shows `tools` to the model and
    reads further `variables`. An answer may call the `callable` ones, has to where that is `forced`, and
    several at once where they are `parallel`. Else it is text, or what a `structure` says. Of a chat that
    `is_continued` the answer goes on with the last message."""

    turns: Turns
    tools: Tools = ()
    callable: Sequence[Tool] = ()
    forced: bool = False
    parallel: bool = True
    structure: Structure | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_continued: bool = False
    length: int = field(init=False)  # characters

    def __post_init__(self) -> None:
        given = [self.turns, self.tools, self.variables]
        object.__setattr__(self, "length", sum(map(len, texts_of(given))))
