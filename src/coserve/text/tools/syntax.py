"""Texts around a call, as one format writes them: a pattern that reads them and literals that a grammar
has."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import regex

NAME: Final = "\0"  # stands in a literal for the name of the tool
NUMBER: Final = "\1"  # the same for the number of the call, which a model counts itself
ANY_NUMBER: Final = "[0-9]{1,4}"
LONGEST_TOOL_NAME: Final = 128
TOOL_NAME: Final = rf"[a-zA-Z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}"
_SPACE: Final = re.compile(r"(\s+)")
_MOST_SPACE: Final = 16  # characters of white space that a pattern passes over


def pattern_of(literal: str) -> str:
    """A pattern of `literal`, in which any white space may stand for another, or be left out."""
    pieces = [
        rf"\s{{0,{_MOST_SPACE}}}" if piece.isspace() else re.escape(piece)
        for piece in _SPACE.split(literal)
        if piece
    ]
    pattern = "".join(pieces).replace(re.escape(NAME), f"(?P<name>{TOOL_NAME})")
    return pattern.replace(re.escape(NUMBER), ANY_NUMBER)


@dataclass(frozen=True)
class Syntax:
    """The texts around calls: `opening` before the first, `before` the arguments of each with `NAME` in it,
    `after` them, `between` two calls, and `closing` after the last.

    A format whose calls stand `anywhere` may have text before them, which does not hold the `marker` that
    they begin with; other calls are the whole answer. `reads_after` is a pattern of what follows arguments,
    where that is more than `after`, `reads_before` one of `before`, and `skipped` a text that may stand
    before all calls. `marks` are texts within arguments that may be special tokens. All patterns end with a
    character that is not optional, so they match as soon as they can.
    """

    before: str
    after: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    anywhere: bool = True
    reads_before: str = ""
    reads_after: str = ""
    skipped: str = ""
    marks: tuple[str, ...] = ()

    @cached_property
    def marker(self) -> str:
        """The beginning of the first call: its first word, or all that is before the name."""
        if self.anywhere:
            return _SPACE.split((self.opening or self.before).partition(NAME)[0])[0]
        return (self.opening + self.before).partition(NAME)[0]

    @cached_property
    def first(self) -> Any:
        """A compiled pattern of the beginning of the first call."""
        skipped = rf"(?:{re.escape(self.skipped)}\s{{0,{_MOST_SPACE}}})?" if self.skipped else ""
        return regex.compile(skipped + pattern_of(self.opening) + self._before)

    @cached_property
    def next(self) -> Any:
        """A compiled pattern of what is between two calls, and the beginning of the second."""
        return regex.compile(pattern_of(self.between) + self._before)

    @cached_property
    def ending(self) -> Any:
        """A compiled pattern of what follows the arguments."""
        return regex.compile(self.reads_after or pattern_of(self.after))

    @cached_property
    def last(self) -> Any:
        """A compiled pattern of what follows the last call; None if nothing does."""
        return regex.compile(pattern_of(self.closing)) if self.closing else None

    @property
    def _before(self) -> str:
        # White space at the end is the arguments' reader's, as a pattern could not tell whether more follows.
        return self.reads_before or pattern_of(self.before.rstrip())

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts that the format writes."""
        return self.skipped, self.opening, self.before, self.after, self.between, self.closing, *self.marks
