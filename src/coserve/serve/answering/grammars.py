"""Grammars of answers to chats: JSON of a schema, and calls of tools."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llguidance import LLMatcher

from coserve.errors import DataError
from coserve.serve.answering.chat import Chat
from coserve.serve.answering.cost import MOST_GRAMMAR_BYTES
from coserve.serve.errors import ApiError
from coserve.text.markup import Markup, Markups
from coserve.text.tools.grammar import AnswerParts, answer_grammar
from coserve.text.tools.lark import COMPACT, Lark


def chat_grammar(chat: Chat, markup: Markup, markups: Markups) -> str:
    """The grammar of answers to a chat with a schema or with tools. Raises ApiError for a bad schema, and
    may take seconds even for a small one."""
    if chat.schema is None:
        return _of_tools(chat, markup, markups.lark())
    grammar = schema_grammar(chat.schema)
    return _of_tools(chat, markup, markups.lark()) if chat.callable or markup.is_open else grammar


def _of_tools(chat: Chat, markup: Markup, lark: Lark) -> str:
    wanted = AnswerParts(
        markup.format,
        chat.callable,
        chat.forced,
        chat.parallel,
        chat.schema,
        markup.has_reasoning,
        markup.is_open,
    )
    try:
        grammar = answer_grammar(wanted, lark)
    except DataError as error:
        raise _bad_tools(str(error)) from error
    if len(grammar) > MOST_GRAMMAR_BYTES:
        raise _bad_tools(f"their grammar has {len(grammar)} bytes; at most {MOST_GRAMMAR_BYTES} are allowed")
    if reason := _wrong(grammar):
        for index, tool in enumerate(chat.callable):
            if of_one := _wrong(answer_grammar(replace(wanted, tools=[tool], schema=None), lark.empty())):
                raise _bad_tools(f"tools[{index}], {tool.name!r}: {of_one}")
        raise _bad_tools(reason)
    return grammar


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a grammar. Raises ApiError for a bad one, and may take a second."""
    try:
        written = json.dumps(schema)
    except RecursionError as error:
        raise _bad_schema("it is nested too deeply") from error
    if len(written) > MOST_GRAMMAR_BYTES:
        raise _bad_schema(f"it has {len(written)} bytes; at most {MOST_GRAMMAR_BYTES} are allowed")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(written, overrides=COMPACT)
    except ValueError as error:
        raise _bad_schema(str(error)) from error
    if reason := _wrong(grammar):
        raise _bad_schema(reason)
    return grammar


def _wrong(grammar: str) -> str:
    """The reason for which a grammar is none; empty for a right one."""
    reason: str = LLMatcher.validate_grammar(grammar)
    return reason.partition("\n")[0]


def _bad_schema(reason: str) -> ApiError:
    message = f"Invalid schema for response_format: {reason}"
    return ApiError(400, message, param="response_format", code="invalid_schema")


def _bad_tools(reason: str) -> ApiError:
    return ApiError(400, f"Invalid schema for tools: {reason}", param="tools", code="invalid_schema")
