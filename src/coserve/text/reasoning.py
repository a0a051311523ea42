"""Reasoning before an answer, in `<think>` and `</think>`."""

from typing import Final

from coserve.text.deltas import Delta, ReasoningDelta
from coserve.text.pending import begun, spaces_at_end

OPENING: Final = "<think>"
CLOSING: Final = "</think>"
_SPACE: Final = "\n"  # around reasoning, which is no part of it
_MOST_SPACE: Final = 16


class ReasoningReader:
    """Splits off the reasoning at the beginning of an answer that arrives in pieces; where it `is_open` the
    prompt has its opening mark."""

    def __init__(self, is_open: bool) -> None:
        self._held = ""
        self._is_open, self._is_over = is_open, False
        self._begins = True  # nothing has been told of the part under way

    def push(self, text: str) -> tuple[list[Delta], str]:
        """(the reasoning that is decided, the text after it)."""
        if self._is_over:
            return [], self._after(text)
        self._held += text
        if not self._is_open:
            begin = self._held.lstrip()
            if len(self._held) - len(begin) > _MOST_SPACE or not OPENING.startswith(begin[: len(OPENING)]):
                return [], self._ended_without()
            if len(begin) < len(OPENING):
                return [], ""
            self._held, self._is_open = begin.removeprefix(OPENING), True
        return self._reasoning()

    def finish(self) -> tuple[list[Delta], str]:
        """As `push`, at the end of the answer."""
        held, self._held = self._held, ""
        if self._is_over or not self._is_open:
            return [], held
        thought = held[: len(held) - spaces_at_end(held, _MOST_SPACE, _SPACE)]
        return _told(thought.lstrip(_SPACE) if self._begins else thought), ""

    def _ended_without(self) -> str:
        """The text of an answer that has no reasoning."""
        text, self._held = self._held, ""
        self._is_over, self._begins = True, False
        return text

    def _reasoning(self) -> tuple[list[Delta], str]:
        text = self._held
        place = text.find(CLOSING)
        if place >= 0:
            thought = text[: place - spaces_at_end(text[:place], _MOST_SPACE, _SPACE)]
            rest, self._held = text[place + len(CLOSING) :], ""
            found = _told(thought.lstrip(_SPACE) if self._begins else thought)
            self._is_over = self._begins = True
            return found, self._after(rest)
        thought = text[: len(text) - begun(CLOSING, text)]
        thought = thought[: len(thought) - spaces_at_end(thought, _MOST_SPACE, _SPACE)]
        self._held = text[len(thought) :]
        told = thought.lstrip(_SPACE) if self._begins else thought
        self._begins = self._begins and not told
        return _told(told), ""

    def _after(self, text: str) -> str:
        """The answer's text, without the line breaks between it and the reasoning."""
        if self._begins:
            text = text.lstrip(_SPACE)
            self._begins = not text
        return text


def _told(text: str) -> list[Delta]:
    return [ReasoningDelta(text)] if text else []
