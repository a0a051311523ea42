"""Forms that a whole answer is held to: JSON, a pattern, a choice, a grammar."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from coserve.serve.answering.cost import MOST_GRAMMAR_BYTES
from coserve.serve.errors import ApiError
from coserve.text.tools.lark import COMPACT, Lark, parse_error

_SLASH: Final = re.compile(r"((?<!\\)(?:\\\\)*)/")


@dataclass(frozen=True, slots=True)
class Structure:
    """A form of answers: JSON of a schema, a regular expression, one of several texts, or a grammar in Lark
    or GBNF. `param` is where the request has it."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    param: str = "response_format"

    @classmethod
    def of_schema(cls, schema: Any, param: str = "response_format") -> "Structure | None":
        """JSON of a schema; None without one."""
        return None if schema is None else cls("json", schema, param)

    def expression(self, lark: Lark) -> str:
        """An expression of a grammar for it, which stands for itself alone in a rule. Raises ApiError for a
        grammar, which is no part of another."""
        match self.kind:
            case "json":
                return lark.json_compact(self.value)
            case "regex":
                pattern = _SLASH.sub(r"\1\\/", self.value).replace("\n", "\\n")
                return lark.rule("PATTERN", f"/{pattern}/")
            case "choice":
                return " | ".join(map(lark.literal, self.value))
        message = "A grammar goes with neither tools nor a model that begins its answers with reasoning."
        raise ApiError(400, message, param=self.param, code="invalid_value")

    def grammar(self, lark: Lark) -> str:
        """The grammar of answers of this form. Raises ApiError for a bad one, and may take seconds even for a
        small one."""
        try:
            found = self._grammar(lark)
        except RecursionError as error:
            raise self.bad("it is nested too deeply") from error
        except ValueError as error:
            raise self.bad(str(error) or type(error).__name__) from error
        if len(found) > MOST_GRAMMAR_BYTES:
            raise self.bad(f"it has {len(found)} bytes; at most {MOST_GRAMMAR_BYTES} are allowed")
        if reason := wrong(found):
            raise self.bad(reason)
        return found

    def _grammar(self, lark: Lark) -> str:
        match self.kind:
            case "json":
                return str(LLMatcher.grammar_from_json_schema(json.dumps(self.value), overrides=COMPACT))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(_lark_of(self.value)))
        return lark.written(self.expression(lark))

    def bad(self, reason: str) -> ApiError:
        """The error for one that cannot be used."""
        what = "schema" if self.kind == "json" else self.kind
        message = f"Invalid {what} for {self.param}: {reason}"
        return ApiError(400, message, param=self.param, code=f"invalid_{what}")


def _lark_of(text: str) -> str:
    """A grammar in Lark of one in Lark or GBNF. Raises ValueError and RecursionError."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises the class itself, and IndexError at the end of a text
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from error


def wrong(grammar: str) -> str:
    """The reason for which a grammar is none; empty for a right one."""
    return parse_error(LLMatcher.validate_grammar(grammar))
