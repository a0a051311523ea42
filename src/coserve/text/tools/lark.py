"""Grammars in llguidance's dialect of Lark, for the tokens of one tokenizer.

An added token (`<tool_call>`) is one terminal, which no text matches: llguidance takes all of them for
control tokens. So a literal that spells some is written as a sequence of texts and tokens, and free text
lists those that may stand in it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Final

# As templates write JSON: Python's separators, and no other white space, of which an uncertain model would
# write more until its tokens are used up.
_AS_TEMPLATES: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPACT: Final[Any] = {"whitespace_flexible": False}
_ANY: Final = "(?s:.+)"
_IN_PATTERN: Final = re.compile(r"([\\.+*?()|\[\]{}^$/])")


class Lark:
    """A grammar that is written rule by rule."""

    def __init__(self, added: Mapping[str, int], free: Iterable[int]) -> None:
        """`added` has all tokens of the tokenizer that no text becomes but their own spelling; the `free`
        ones may stand in free text."""
        self._added, self._free = added, frozenset(free)
        names = sorted(filter(None, added), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules = list[str]()

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule; returns its name."""
        self._rules.append(f"{name}{options}: {body}")
        return name

    def empty(self) -> "Lark":
        """Another grammar for the same tokens, without rules."""
        made = copy(self)
        made._rules = []
        return made

    def new(self, prefix: str) -> str:
        """A name for a rule that no other has."""
        return f"{prefix}_{len(self._rules)}"

    def literal(self, text: str) -> str:
        """An expression that matches `text`; empty for none."""
        pieces = self._split.split(text) if self._split is not None else [text]
        return " ".join(self._token(piece) or quoted(piece) for piece in pieces if piece)

    def json(self, schema: Mapping[str, Any], strict: bool) -> str:
        """An expression that matches JSON of a schema, as templates write it. Unless `strict`, keywords that
        cannot be enforced are left out."""
        given = {**without_notes(schema), "x-guidance": {**_AS_TEMPLATES, "lenient": not strict}}
        return f"%json {json.dumps(given)}"

    def json_compact(self, schema: Mapping[str, Any]) -> str:
        """An expression that matches JSON of a schema without white space. Keywords that cannot be enforced
        are errors."""
        return f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}"

    def free(self, name: str, without: str = "", not_first: str = "") -> str:
        """A rule for any text, also none, that does not hold the literal `without` and does not begin with
        the pattern `not_first`."""
        text = self._text(name, without)
        first = text
        if not_first:
            first = self.rule(f"{name.upper()}_FIRST", f"/{_ANY}/ & ~/{not_first}(?s:.*)/")
        others = self._others(without)
        return self.rule(name, f"{first}? ({others} {text}?)*" if others else f"{first}?")

    def until(self, name: str, marker: str) -> str:
        """A rule for any text up to a literal, with that."""
        text, others = self._text(name, marker), self._others(marker)
        before = f"({text}? {others})* " if others else ""
        spelled, token, rest = self._parted(marker)
        if token:  # what is spelled before the token is text
            return self.rule(name, f"{before}{text}? {self._token(token)} {self.literal(rest)}".rstrip())
        ending = self.rule(f"{name}_marker", "/(?s:.*)/", f"[suffix={quoted(spelled)}]")
        return self.rule(name, f"{before}{ending}")

    def written(self, start: str) -> str:
        """The grammar whose matches are those of the expression `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def _parted(self, text: str) -> tuple[str, str, str]:
        """The first added token in a text, and what is before and after it."""
        found = self._split.search(text) if self._split is not None else None
        return (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])

    def _text(self, name: str, without: str) -> str:
        limit = f" & ~/(?s:.*){in_pattern(without)}(?s:.*)/" if without else ""
        return self.rule(f"{name.upper()}_TEXT", f"/{_ANY}/{limit}")

    def _others(self, without: str) -> str:
        """An expression for a token that may stand in free text; empty if there is none."""
        ids = sorted(self._free - {self._added.get(without, -1)})
        return f"<[{','.join(map(str, ids))}]>" if ids else ""

    def _token(self, text: str) -> str | None:
        return f"<[{self._added[text]}]>" if text in self._added else None


_NOTES: Final = frozenset({"title", "description", "examples", "default", "$comment", "$schema", "$id"})
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset({"enum", "const"})


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without what it says to readers: clients send tens of kilobytes of that, which no grammar
    has."""
    return {
        key: value
        if key in _VALUES
        else {name: _without_notes(one) for name, one in value.items()}
        if key in _BY_NAME and isinstance(value, Mapping)
        else _without_notes(value)
        for key, value in schema.items()
        if key not in _NOTES
    }


def _without_notes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_notes(value)
    return [_without_notes(one) for one in value] if isinstance(value, list) else value


def quoted(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def in_pattern(text: str) -> str:
    """A pattern of a grammar that matches `text`."""
    return _IN_PATTERN.sub(r"\\\1", text).replace("\n", "\\n")


def parse_error(text: str) -> str:
    """The message of llguidance for a bad grammar as one line: its first line, and the reason that a parser
    of patterns gives below a drawing of the place; empty for a good grammar."""
    first, *further = text.strip().split("\n")
    reasons = [line.removeprefix("error: ") for line in further if line.startswith("error: ")]
    return f"{first} {reasons[0]}" if first.endswith(":") and reasons else first
