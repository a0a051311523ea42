"""GPT-OSS' harmony: an answer is one or several messages, each with a header that names its channel.

`<|channel|>analysis<|message|>` is before reasoning, `<|channel|>final<|message|>` before what is said, and a
message `to=functions.name` in the channel `commentary` is a call, with JSON; without a recipient it is said
before the calls. A prompt ends with `<|start|>assistant`, so the first header has no such beginning.
A message ends with `<|end|>`, and the answer with `<|return|>` or `<|call|>`: so it has one call at most.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from coserve.text.deltas import ArgumentsDelta, CallBegun, Delta, ReasoningDelta, TextDelta
from coserve.text.pending import begun
from coserve.text.tools.json_calls import JsonCalls, JsonObject
from coserve.text.tools.lark import Lark, quoted
from coserve.text.tools.syntax import NAME, TOOL_NAME, Syntax
from coserve.text.tools.tool import Tool

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
_END: Final = "<|end|>"
_CALL: Final = "<|call|>"
_RETURN: Final = "<|return|>"
_CONSTRAIN: Final = "<|constrain|>"

ANALYSIS: Final = "analysis"
_COMMENTARY: Final = "commentary"
_FINAL: Final = "final"
_ROLE: Final = "assistant"
_RECIPIENT: Final = f" to=functions.{NAME}"
HARMONY: Final = JsonCalls(
    "harmony",
    Syntax(
        before=f"{CHANNEL}{_COMMENTARY}{_RECIPIENT} {_CONSTRAIN}json{MESSAGE}",
        after=_CALL,
        marks=(START, _END, _RETURN),
    ),
)

_MARKS: Final = (_END, _CALL, _RETURN, START)  # after a message
_TO: Final = "to=functions."
_HEADERS: Final = (START, CHANNEL, MESSAGE, _TO)  # beginnings of one
_LONGEST: Final = 512  # characters of a header
_CHANNEL_NAME: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_CALLED: Final = re.compile(rf"\bto=(?:functions\.)?({TOOL_NAME})")


class ChannelReader:
    """Reads the messages of one answer as it arrives: reasoning, text, and calls of `tools`. The prompt ends
    within a message of the channel `within`, or before a header where that is empty.

    What is no message, or calls no tool that there is, is told as text.
    """

    def __init__(self, within: str, tools: Mapping[str, Tool]) -> None:
        self.count = 0  # of calls that have begun
        self._tools = tools
        self._held = ""  # text that is not decided
        self._channel: str | None = within or None  # of the message under way; None in a header
        self._arguments: JsonObject | None = None  # of the call under way
        self._is_call = False
        self._told = set[str]()  # channels with text, of which the next message is a paragraph of its own
        self._found = list[Delta]()

    def push(self, text: str) -> list[Delta]:
        """Reads one more piece."""
        self._held += text
        while self._held and (self._read_header() if self._channel is None else self._read_message()):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Reads to the end: what was held back, but for a header that is cut off, or a mark."""
        held, self._held = self._held, ""
        if self._channel is None and ("<|" in held or held.lstrip().startswith(_TO)):
            return self._taken()
        if not self._is_call:
            self._tell(held[: len(held) - max(begun(mark, held) for mark in _MARKS)])
        return self._taken()

    def _taken(self) -> list[Delta]:
        found, self._found = self._found, []
        return found

    def _read_header(self) -> bool:
        """Takes a header; False where more text has to come first."""
        held = self._held.lstrip()
        end = held.find(MESSAGE, 0, _LONGEST)
        is_one = any(held.startswith(mark[: len(held)]) for mark in _HEADERS)
        if not is_one or (end < 0 and len(held) >= _LONGEST):
            self._begin(_FINAL)  # text without a header
            if held.startswith(START):  # which would begin one again
                self._tell(START)
                self._held = held.removeprefix(START)
            return True
        if end < 0:
            return False
        header, self._held = held[:end], held[end + len(MESSAGE) :]
        named, called = _CHANNEL_NAME.search(header), _CALLED.search(header)
        self._begin(named[1] if named else _FINAL, called[1] if called else None)
        return True

    def _begin(self, channel: str, recipient: str | None = None) -> None:
        self._channel, self._is_call = channel, recipient in self._tools
        if recipient is not None and self._is_call:
            self._found.append(CallBegun(self.count, HARMONY.new_id(), recipient))
            self.count += 1
            self._arguments = JsonObject()
        elif (kind := self._kind) in self._told:
            self._found.append(ReasoningDelta("\n") if kind == ANALYSIS else TextDelta("\n"))

    @property
    def _kind(self) -> str:
        return ANALYSIS if self._channel == ANALYSIS else _FINAL

    def _read_message(self) -> bool:
        if self._arguments is not None:
            told, rest = self._arguments.push(self._held)
            self._tell(told)
            self._held = rest or ""
            if rest is not None:
                self._arguments = None
            return rest is not None
        held = self._held
        places = {mark: place for mark in _MARKS if (place := held.find(mark)) >= 0}
        if not places:
            end = len(held) - max(begun(mark, held) for mark in _MARKS)
            self._tell("" if self._is_call else held[:end])  # nothing follows arguments
            self._held = held[end:]
            return False
        mark = min(places, key=lambda one: places[one])
        self._tell("" if self._is_call else held[: places[mark]])
        self._held = held[places[mark] + (0 if mark == START else len(mark)) :]
        self._channel = None
        return True

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._arguments is not None:
            self._found.append(ArgumentsDelta(self.count - 1, text))
            return
        self._told.add(self._kind)
        self._found.append(ReasoningDelta(text) if self._kind == ANALYSIS else TextDelta(text))


def channel_at_end(end: str) -> str:
    """The channel of the message within which the end of a prompt is; empty where it ends before a header."""
    _, start, message = end.rpartition(START)
    header, is_within, _ = message.partition(MESSAGE)
    if not (start and is_within):
        return ""
    found = _CHANNEL_NAME.search(header)
    return found[1] if found else _FINAL


def channel_grammar(
    lark: Lark, calls: Sequence[tuple[Tool, str]], within: str, answer: str | None, forced: bool
) -> str:
    """The grammar of an answer that begins in the channel `within` of a prompt's end: reasoning, then a call,
    each with the expression of its arguments, or, unless that is `forced`, text or what `answer` matches."""
    again = f"{lark.literal(START)} {quoted(_ROLE)}"
    message, constrain = lark.literal(MESSAGE), lark.literal(_CONSTRAIN)
    thought = f"{lark.literal(CHANNEL)} {quoted(ANALYSIS)} {message} {lark.until('thought', _END)} {again}"
    said = "" if answer is None and forced else (answer or lark.free("text"))
    kinds = (
        [f"{lark.literal(CHANNEL)} {quoted(_FINAL)} {message} {lark.rule('said', said)}"]
        if not forced
        else []
    )
    if calls:
        form = lark.rule("form", f'" "? {constrain} "json" | " json"')
        in_commentary = f"{lark.literal(CHANNEL)} {quoted(_COMMENTARY)}"
        for index, (tool, arguments) in enumerate(calls):
            to = quoted(_RECIPIENT.replace(NAME, tool.name))
            rest = lark.rule(f"call_{index}", f"{form}? {message} {arguments}")
            kinds += [f"{in_commentary} {to} {rest}", f"{to} {in_commentary} {rest}"]
    if not forced and answer is None:
        before = (
            f"{lark.literal(CHANNEL)} {quoted(_COMMENTARY)} {message} {lark.until('preamble', _END)} {again}"
        )
        thought = f"{thought} | {before}"
    body = lark.rule(
        "messages", f"({lark.rule('before', thought)})* ({lark.rule('last', ' | '.join(kinds))})"
    )
    if within == ANALYSIS:
        return lark.written(f"{lark.until('rest', _END)} {again} {body}")
    if within:
        return lark.written(f"{lark.literal(_END)} {again} {body}" if forced else lark.rule("whole", said))
    return lark.written(body)
