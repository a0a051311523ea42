"""Splits an answer's text into what it says and calls of tools, as it arrives.

The deltas, joined, do not depend on where the pieces are cut. What has begun like a call and is none is told
as text.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from coserve.text.deltas import ArgumentsDelta, CallBegun, Delta, TextDelta
from coserve.text.pending import begun, spaces_at_end
from coserve.text.tools.format import ArgumentReader, ToolFormat
from coserve.text.tools.tool import Tool

_MOST_SPACE: Final = 16  # characters of white space right before calls that are no part of the text


class _Place(Enum):
    """The part of an answer that is read next."""

    TEXT = auto()
    FIRST = auto()  # the beginning of the first call, which has the marker
    ARGUMENTS = auto()
    TAIL = auto()  # what follows the arguments
    NEXT = auto()  # the beginning of another call, or the end of all


class CallReader:
    """Reads the calls of some tools, by name, in one answer."""

    def __init__(self, format: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self.count = 0  # of calls that have begun
        self._format, self._syntax, self._tools = format, format.syntax, tools
        self._place = _Place.TEXT if format.syntax.anywhere else _Place.FIRST
        self._held = ""  # text that is not decided
        self._found = list[Delta]()
        self._arguments: ArgumentReader | None = None

    def push(self, text: str) -> list[Delta]:
        """Reads one more piece."""
        self._held += text
        while self._held and self._advanced():
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Reads to the end: what was held back, but for the marks of a call that is cut off."""
        match self._place:
            case _Place.ARGUMENTS:
                assert self._arguments is not None
                self._tell(self._arguments.finish())
            case _Place.FIRST if self._syntax.anywhere:
                pass  # a marker, and no name yet
            case _Place.TAIL:
                pass  # the beginning of one, as it was not refused
            case _Place.NEXT if not self._held.strip() or self._held.strip().startswith(self._syntax.marker):
                pass
            case _:
                self._say(self._held)
        self._held, self._place = "", _Place.TEXT
        return self._taken()

    def _taken(self) -> list[Delta]:
        found, self._found = self._found, []
        return found

    def _advanced(self) -> bool:
        """Takes what is decided of the next part; False where more text has to come first."""
        match self._place:
            case _Place.TEXT:
                return self._read_text()
            case _Place.ARGUMENTS:
                return self._read_arguments()
            case _Place.TAIL:
                return self._read_tail()
        first = self._place is _Place.FIRST
        found = _matched(self._syntax.first if first else self._syntax.next, self._held)
        last = None if first or self._syntax.last is None else _matched(self._syntax.last, self._held)
        if found is not None and not found.partial and found["name"] in self._tools:
            self._begin(found["name"], found.end())
        elif last is not None and not last.partial:
            self._held, self._place = self._held[last.end() :], _Place.TEXT
        elif (found is not None and found.partial) or last is not None:
            return False
        else:
            self._place = _Place.TEXT
            if first:
                self._pass_marker()
        return True

    def _read_text(self) -> bool:
        if not self._syntax.anywhere:  # calls are at the beginning alone
            self._say(self._held)
            self._held = ""
            return False
        marker, text = self._syntax.marker, self._held
        place = text.find(marker)
        end = len(text) - begun(marker, text) if place < 0 else place
        said = text[:end]
        said = said[: len(said) - spaces_at_end(said, _MOST_SPACE)]
        self._say(said)
        if place < 0:
            self._held = text[len(said) :]
            return False
        self._held, self._place = text[place:], _Place.FIRST
        return True

    def _pass_marker(self) -> None:
        """Tells the marker of what is no call as text."""
        length = len(self._syntax.marker) if self._syntax.anywhere else len(self._held)
        self._say(self._held[:length])
        self._held = self._held[length:]

    def _begin(self, name: str, end: int) -> None:
        self._held = self._held[end:]
        self._found.append(CallBegun(self.count, self._format.new_id(), name))
        self.count += 1
        self._arguments, self._place = self._format.arguments(self._tools[name]), _Place.ARGUMENTS

    def _read_arguments(self) -> bool:
        assert self._arguments is not None
        told, rest = self._arguments.push(self._held)
        self._tell(told)
        self._held = rest or ""
        if rest is None:
            return False
        self._arguments, self._place = None, _Place.TAIL
        return True

    def _read_tail(self) -> bool:
        found = _matched(self._syntax.ending, self._held)
        if found is not None and found.partial:
            return False
        self._place = _Place.TEXT if found is None else _Place.NEXT
        self._held = self._held[0 if found is None else found.end() :]
        return True

    def _say(self, text: str) -> None:
        if text:
            self._found.append(TextDelta(text))

    def _tell(self, arguments: str) -> None:
        if arguments:
            self._found.append(ArgumentsDelta(self.count - 1, arguments))


def _matched(pattern: Any, text: str) -> Any:
    """The match of a pattern at the beginning of `text`, `partial` where more text may complete it."""
    return pattern.match(text, partial=True)
