"""A chat that is to be answered, in no dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coserve.errors import DataError
from coserve.serve.answering.cost import MOST_GRAMMAR_BYTES
from coserve.serve.answering.structure import Structure, wrong
from coserve.serve.errors import ApiError
from coserve.text.chat import texts_of
from coserve.text.markup import Markup, Markups
from coserve.text.rendering import Tools, Turns
from coserve.text.tools.grammar import AnswerParts, answer_grammar
from coserve.text.tools.lark import Lark
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


def chat_grammar(chat: Chat, markup: Markup, markups: Markups) -> str:
    """The grammar of answers to a chat with a structure or with tools. Raises ApiError for a bad one, and
    may take seconds even for a small one."""
    if chat.structure is None:
        return _of_tools(chat, markup, markups.lark())
    grammar = chat.structure.grammar(markups.lark())
    is_within = markup.is_open or markup.channel is not None  # reasoning, or channels
    return _of_tools(chat, markup, markups.lark()) if chat.callable or is_within else grammar


def _of_tools(chat: Chat, markup: Markup, lark: Lark) -> str:
    wanted = AnswerParts(
        markup.format,
        chat.callable,
        chat.forced,
        chat.parallel,
        None if chat.structure is None else chat.structure.expression(lark),
        markup.has_reasoning,
        markup.is_open,
        markup.channel,
    )
    try:
        grammar = answer_grammar(wanted, lark)
    except DataError as error:
        raise _bad_tools(str(error)) from error
    if len(grammar) > MOST_GRAMMAR_BYTES:
        raise _bad_tools(f"their grammar has {len(grammar)} bytes; at most {MOST_GRAMMAR_BYTES} are allowed")
    if reason := wrong(grammar):
        for index, tool in enumerate(chat.callable):
            if of_one := wrong(answer_grammar(replace(wanted, tools=[tool], answer=None), lark.empty())):
                raise _bad_tools(f"tools[{index}], {tool.name!r}: {of_one}")
        raise _bad_tools(reason)
    return grammar


def _bad_tools(reason: str) -> ApiError:
    return ApiError(400, f"Invalid schema for tools: {reason}", param="tools", code="invalid_schema")
