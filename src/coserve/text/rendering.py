"""Chats as text by the tokenizer's template, which runs in a sandbox: it is a program from the model's
folder, whose time may grow as it likes with a tenant's chat."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from coserve.errors import DataError, LimitExceeded
from coserve.sandbox.pool import SandboxPool
from coserve.text.tokenizer import Tokenizer

Turns = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
Rendered = tuple[str, list[tuple[int, int]]]

NO_VARIABLES: Final[Variables] = MappingProxyType({})
SECONDS: Final = 5.0  # of processor time for a chat; of requests 2,000 turns take 0.05
_MEMORY: Final = 512 * 2**20
_AT_ONCE: Final = 8  # chats that are rendered at once


def render_request(
    tokenizer: Tokenizer,
    turns: Turns,
    tools: Tools = (),
    variables: Variables = NO_VARIABLES,
    is_continued: bool = False,
) -> str:
    """A chat with the generation prompt, or one whose last message `is_continued` up to the end of that. The
    template reads further `variables`. Tools that it leaves out are told in words. Raises DataError where it
    refuses the chat or takes too long."""
    return _render("continued" if is_continued else "request", tokenizer, turns, tools, variables)[0]


def render_turns(tokenizer: Tokenizer, turns: Turns, tools: Tools = ()) -> str:
    """A chat without the generation prompt. Raises what `render_request` does."""
    return _render("prefixes", tokenizer, turns, tools, NO_VARIABLES, [False] * len(turns), None)[0]


def render_marked(tokenizer: Tokenizer, turns: Turns, tools: Tools = ()) -> Rendered:
    """A chat, and the spans in characters that its template marks with {% generation %}. Raises what
    `render_request` does."""
    return _render("marked", tokenizer, turns, tools, NO_VARIABLES)


def render_prefixes(
    tokenizer: Tokenizer, turns: Turns, learned: Sequence[bool], tools: Tools = ()
) -> Rendered:
    """A chat, and the spans in characters of the assistant's turns that are learned. Raises what
    `render_request` does, also for a template that rewrites earlier turns."""
    return _render("prefixes", tokenizer, turns, tools, NO_VARIABLES, list(learned), tokenizer.eos_token)


def _render(
    what: str, tokenizer: Tokenizer, turns: Turns, tools: Tools, variables: Variables, *more: Any
) -> Rendered:
    given = [dict(tool) for tool in tools] or None  # templates ask whether there are any
    try:
        template = tokenizer.get_chat_template(tools=given)
        # As `apply_chat_template` does: many templates write "None" for a key that is there.
        there = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
        special = {**variables, **tokenizer.special_tokens_map}
        text, spans = _renderers(os.getpid()).call(
            what, template, special, there, given, *more, seconds=SECONDS
        )
    except LimitExceeded as error:
        raise DataError(
            f"the chat template cannot render this chat of {len(turns)} messages: {error}; split the chat, "
            "or mark what is learned with {% generation %} in the template"
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the chat template cannot be given this chat: {error}") from error
    return text, [(start, end) for start, end in spans]


@cache
def _renderers(_: int) -> SandboxPool:
    """The renderers of this process; of a fork's parent none can be used."""
    return SandboxPool("coserve.text.templates:render", _AT_ONCE, _MEMORY, keep=("TZ",))
