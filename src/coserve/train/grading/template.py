"""Templates of graders, as OpenAI's graders have them: `{{sample.output_text}}`, `{{item.answer}}`."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from coserve.errors import ConfigError, DataError

ANSWER: Final = "{{sample.output_text}}"
_FIELD: Final = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_LONGEST: Final = 10_000  # characters of a template


class Template:
    """A text with fields of the prompt's record (`item`) and of the sampled answer (`sample.output_text`)."""

    def __init__(self, text: str, what: str) -> None:
        """`what` names the template in errors. Raises ConfigError for a field that is neither."""
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ConfigError(f"{what} must be a text of at most {_LONGEST} characters")
        for field in _FIELD.findall(text):
            if field != "sample.output_text" and not field.startswith("item."):
                raise ConfigError(
                    f"{what} has the field {field!r}: there are sample.output_text and item.NAME"
                )
        self._text = text

    def render(self, answer: str, item: Mapping[str, Any]) -> str:
        """The text with its fields filled in. Raises DataError for a field that the record lacks."""
        return _FIELD.sub(lambda found: self._value(found[1], answer, item), self._text)

    def check(self, item: Mapping[str, Any]) -> None:
        """Raises DataError for a field that the record lacks."""
        self.render("", item)

    @staticmethod
    def _value(field: str, answer: str, item: Mapping[str, Any]) -> str:
        if field == "sample.output_text":
            return answer
        value: Any = item
        for name in field.split(".")[1:]:
            if not isinstance(value, Mapping) or name not in value:
                known = ", ".join(map(str, item)) or "nothing"
                raise DataError(f"the grader needs {field}, and the record has {known}")
            value = value[name]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
