"""Reasoning and calls of tools, which a model's answers have beside what they say."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from coserve.errors import DataError
from coserve.text.deltas import Delta, TextDelta, merged
from coserve.text.reasoning import CLOSING, OPENING, ReasoningReader
from coserve.text.rendering import render_request, render_turns
from coserve.text.tokenizer import Tokenizer
from coserve.text.told_tools import CALLED, TOOLS
from coserve.text.tools.format import ToolFormat
from coserve.text.tools.formats import named_format, written_format
from coserve.text.tools.harmony import CHANNEL, HARMONY, MESSAGE, START, ChannelReader, channel_at_end
from coserve.text.tools.lark import Lark
from coserve.text.tools.reader import CallReader
from coserve.text.tools.tool import Tool

_ENDING: Final = 16  # tokens of a prompt in which its end opens reasoning
_HEADER: Final = 64  # tokens of a message's header


@dataclass(frozen=True, slots=True)
class Markup:
    """A way to read the text of an answer. It `has_reasoning` before it, of which the prompt has the
    opening mark where that `is_open`, and calls of `tools` by name in a `format`. The special tokens `kept`
    are part of its text. An answer in channels goes on within the message of a `channel`, or begins with a
    header where that is empty."""

    has_reasoning: bool = False
    is_open: bool = False
    format: ToolFormat | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)
    channel: str | None = None

    def __bool__(self) -> bool:
        """Tells whether an answer may hold anything but text."""
        return self.has_reasoning or self.format is not None or self.channel is not None

    def reader(self) -> "AnswerReader":
        """A reader of one answer."""
        return AnswerReader(self)


PLAIN: Final = Markup()


class AnswerReader:
    """Splits the text of one answer as it arrives. The deltas, joined, do not depend on where it is cut."""

    def __init__(self, markup: Markup) -> None:
        self._reasoning = ReasoningReader(markup.is_open) if markup.has_reasoning else None
        self._calls: CallReader | ChannelReader | None = None
        if markup.channel is not None:
            self._calls = ChannelReader(markup.channel, markup.tools)
        elif markup.format is not None:
            self._calls = CallReader(markup.format, markup.tools)

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return 0 if self._calls is None else self._calls.count

    def push(self, text: str, is_last: bool = False) -> list[Delta]:
        """The deltas of one more piece of the text; with the last one those of all that was held back."""
        found = list[Delta]()
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            found += thought
            if is_last:
                thought, rest = self._reasoning.finish()
                found += thought
                text += rest
        if self._calls is None:
            found.append(TextDelta(text))
        else:
            found += self._calls.push(text)
            if is_last:
                found += self._calls.finish()
        return list(merged(found))


class Markups:
    """The markup that the chat template of a tokenizer writes. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str | None = None) -> None:
        """`tool_format` names the format of calls, which else the template tells. Raises ConfigError for a
        name that there is not."""
        self._tokenizer = tokenizer
        self._named = None if tool_format is None else named_format(tool_format)
        self._added = {
            str(token): id for id, token in tokenizer.added_tokens_decoder.items() if _is_control(token)
        }
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = {name: self._added[name] for name in special}
        self._template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        self._has_channels = self._named is HARMONY or all(
            mark in self._template for mark in (START, CHANNEL, MESSAGE)
        )
        self.has_reasoning = CLOSING in self._template and not self._has_channels
        self._lock = threading.Lock()

    def reads(self, variable: str) -> bool:
        """Tells whether the template reads a variable of this name."""
        return variable in self._template

    @cached_property
    def _written(self) -> ToolFormat:
        asked = render_request(self._tokenizer, CALLED[:1], TOOLS)
        try:
            answered = render_turns(self._tokenizer, CALLED, TOOLS)
        except DataError as error:
            raise DataError(f"the model's chat template cannot write calls of tools: {error}") from error
        return written_format(answered, asked)

    def format(self) -> ToolFormat:
        """The format of calls. The first time this renders a chat. Raises DataError where the template writes
        none that is known."""
        if self._named is not None:
            return self._named
        with self._lock:
            return self._written

    def of(self, prompt: Sequence[int], tools: Sequence[Tool] = ()) -> Markup:
        """The markup of an answer to a prompt that may call `tools`. Raises as `format` does."""
        format = self.format() if tools else None
        if format is HARMONY or (format is None and self._has_channels):
            tools_by_name = {tool.name: tool for tool in tools}
            return Markup(
                format=format, tools=tools_by_name, kept=self._kept(HARMONY), channel=self._channel(prompt)
            )
        return Markup(
            self.has_reasoning,
            self.has_reasoning and self._is_thinking(prompt),
            format,
            {tool.name: tool for tool in tools},
            self._kept(format),
        )

    def lark(self) -> Lark:
        """An empty grammar for answers of this model."""
        with self._lock:
            return self._blank.empty()

    @cached_property
    def _blank(self) -> Lark:
        return Lark(self._added, {*self._added.values()} - {*self._special.values()})

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        """Tells whether a prompt ends within reasoning, as some templates open it."""
        end = self._tokenizer.decode(list(prompt[-_ENDING:]), clean_up_tokenization_spaces=False)
        return end.rstrip().endswith(OPENING)

    def _channel(self, prompt: Sequence[int]) -> str:
        """The channel of the message within which a prompt ends; empty where it ends before a header."""
        start, message = (self._added.get(mark, -1) for mark in (START, MESSAGE))
        place = next(
            (i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in (start, message)), len(prompt)
        )
        header = list(prompt[max(place - _HEADER, 0) : place + 1])
        return channel_at_end(self._tokenizer.decode(header, clean_up_tokenization_spaces=False))

    def _kept(self, format: ToolFormat | None) -> Mapping[int, str]:
        literals = [
            *([OPENING, CLOSING] if self.has_reasoning else []),
            *(format.syntax.literals if format else ()),
        ]
        written = "\0".join(literals)
        return {id: name for name, id in self._special.items() if name in written}


def _is_control(token: Any) -> bool:
    """Tells whether llguidance takes an added token for a control token, which no text matches."""
    return bool(token.special) or (str(token).startswith("<") and str(token).endswith(">"))
