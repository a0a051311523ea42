"""Templates of graders, as OpenAI's graders have them: `{{sample.output_text}}`,
`{{sample.output_json.label}}`, `{{item.answer}}`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import msgspec

from coserve.errors import ConfigError, DataError

ANSWER: Final = "{{sample.output_text}}"
# White space around a name is no part of it: with three repeats that match it, 1,000 spaces took 1 s.
_FIELD: Final = re.compile(r"\{\{([^{}]*)\}\}")
_JSON: Final = "sample.output_json"
_LONGEST: Final = 10_000  # characters of a template
_SHOWN: Final = 100  # characters of a name in an error
_LONGEST_RENDERED: Final = 1 << 20  # and with its fields filled in: a record's may be long, and come often


class Template:
    """A text with fields of the prompt's record (`item`) and of the sampled answer (`sample.output_text`, and
    `sample.output_json` of one that is JSON; of any other, and where it lacks the field, that is empty)."""

    def __init__(self, text: str, what: str, longest: int = _LONGEST_RENDERED) -> None:
        """`what` names the template in errors; filled in it has at most `longest` characters. Raises
        ConfigError for a field that is neither."""
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ConfigError(f"{what} must be a text of at most {_LONGEST} characters")
        self._what, self._longest = what, longest
        for field in map(str.strip, _FIELD.findall(text)):
            if field not in ("sample.output_text", _JSON) and not field.startswith((f"{_JSON}.", "item.")):
                raise ConfigError(
                    f"{what} has the field {field[:_SHOWN]!r}: there are sample.output_text, {_JSON}.NAME "
                    "and item.NAME"
                )
        self._text = text

    def render(self, answer: str, item: Mapping[str, Any]) -> str:
        """The text with its fields filled in. Raises DataError for a field that the record lacks, and for a
        text that gets too long."""
        room, parsed = self._longest - len(self._text), cache(partial(_parsed, answer))

        def filled(found: re.Match[str]) -> str:
            nonlocal room
            value = self._value(found[1].strip(), answer, item, parsed)
            room -= len(value)
            if room < 0:
                raise DataError(f"{self._what} has more than {self._longest} characters, with its fields")
            return value

        return _FIELD.sub(filled, self._text)

    def check(self, item: Mapping[str, Any]) -> None:
        """Raises DataError for a field that the record lacks."""
        self.render("", item)

    @staticmethod
    def _value(field: str, answer: str, item: Mapping[str, Any], parsed: Callable[[], object]) -> str:
        if field == "sample.output_text":
            return answer
        if field.startswith(_JSON):
            return _at(field.split(".")[2:], parsed())
        value: Any = item
        for name in field.split(".")[1:]:
            if not isinstance(value, Mapping) or name not in value:
                known = ", ".join(map(str, item)) or "nothing"
                raise DataError(f"the grader needs {field[:_SHOWN]}, and the record has {known[:_SHOWN]}")
            value = value[name]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _parsed(answer: str) -> object:
    """The value of an answer that is JSON; None for any other."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _at(path: Sequence[str], value: Any) -> str:
    """The part of a value at a path, as a text; empty where there is none."""
    try:
        for name in path:
            value = value[name] if isinstance(value, Mapping) else value[int(name)]
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
