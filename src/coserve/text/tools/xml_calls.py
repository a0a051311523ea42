"""Calls whose arguments stand one by one between tags, strings as plain text and other values as JSON."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import regex

from coserve.errors import DataError
from coserve.text.pending import begun
from coserve.text.tools.format import ArgumentReader, random_id
from coserve.text.tools.lark import Lark, quoted
from coserve.text.tools.syntax import NAME, Syntax, pattern_of
from coserve.text.tools.tool import Tool

_PARAMETER: Final = r"[^<>\s\"]{1,256}"
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # templates write some values so
# Keywords that say nothing of a string's text, or that its grammar has.
_ENFORCED: Final = frozenset({"type", "enum", "const", "description", "title", "default", "examples"})
_DEFINITIONS: Final = ("$defs", "definitions")


@dataclass(frozen=True)
class ParameterSyntax:
    """The texts around parameters: `before` a value with `NAME` in it, `after` it, and `ending` after all of
    them; each of these may follow white space. A value that `has_lines` stands between two line breaks."""

    before: str
    after: str
    ending: str
    has_lines: bool

    @cached_property
    def first(self) -> Any:
        """A compiled pattern of the beginning of a parameter."""
        before, _, rest = self.before.partition(NAME)
        return regex.compile(rf"\s{{0,16}}{pattern_of(before)}(?P<name>{_PARAMETER}){pattern_of(rest)}")

    @cached_property
    def last(self) -> Any:
        """A compiled pattern of what follows all parameters."""
        return regex.compile(rf"\s{{0,16}}{pattern_of(self.ending)}")


class ParameterReader:
    """Reads arguments that stand between tags as a JSON object. Strings are told as they arrive, other values
    once they are over."""

    def __init__(self, syntax: ParameterSyntax, tool: Tool) -> None:
        self._syntax, self._tool = syntax, tool
        self._held = ""
        self._separator = "{"  # before the next parameter
        self._is_inside = self._is_string = False  # a value, and of a string
        self._is_new = False  # no character of the value has been read

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`. Where neither a parameter nor the end follows, they are over."""
        self._held += text
        told = list[str]()
        while True:
            if self._is_inside:
                told.append(self._value())
                if self._is_inside:
                    return "".join(told), None
            first = self._syntax.first.match(self._held, partial=True)
            last = self._syntax.last.match(self._held, partial=True)
            if first is not None and not first.partial:
                told.append(self._begin(first["name"], first.end()))
            elif (first is not None or last is not None) and (last is None or last.partial):
                return "".join(told), None
            else:
                told.append("{}" if self._separator == "{" else "}")
                return "".join(told), self._held[0 if last is None else last.end() :]

    def finish(self) -> str:
        """See `ArgumentReader`."""
        if not self._is_inside:
            return ""
        text = self._held[: len(self._held) - self._begun_mark()]
        return _escaped(text) if self._is_string else text.strip()

    def _begin(self, name: str, end: int) -> str:
        self._held = self._held[end:]
        self._is_inside = self._is_new = True
        self._is_string = self._tool.type_of(name) == "string"
        separator, self._separator = self._separator, ", "
        key = json.dumps(name, ensure_ascii=False)
        return f'{separator}{key}: "' if self._is_string else f"{separator}{key}: "

    def _value(self) -> str:
        """The JSON of what is decided of the value."""
        mark = self._syntax.after
        line = "\n" * self._syntax.has_lines
        if self._is_new and self._held:
            self._held, self._is_new = self._held.removeprefix(line), False
        place = self._held.find(mark)
        if place < 0:
            if not self._is_string:
                return ""
            end = len(self._held) - self._begun_mark()
            text, self._held = self._held[:end], self._held[end:]
            return _escaped(text)
        text, self._held = self._held[:place], self._held[place + len(mark) :]
        self._is_inside = False
        text = text.removesuffix(line)
        return f'{_escaped(text)}"' if self._is_string else _json_of(text)

    def _begun_mark(self) -> int:
        """The length of what may be the beginning of the mark after the value."""
        mark, line = self._syntax.after, "\n" * self._syntax.has_lines
        return max(begun(mark, self._held), begun(line + mark, self._held))


@dataclass(frozen=True)
class XmlCalls:
    """A format whose arguments stand between tags."""

    name: str
    syntax: Syntax
    parameters: ParameterSyntax

    def new_id(self) -> str:
        """See `ToolFormat`."""
        return f"call_{random_id(24)}"

    def arguments(self, tool: Tool) -> ArgumentReader:
        """See `ToolFormat`."""
        return ParameterReader(self.parameters, tool)

    def grammar(self, lark: Lark, tool: Tool) -> str:
        """See `ToolFormat`. Parameters are in the order of the schema."""
        schema = tool.parameters
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise DataError('expected "properties" to be an object and "required" a list')
        if tool.strict and (missing := [name for name in required if name not in properties]):
            raise DataError(f"the required {missing[0]!r} is not among the properties")
        shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
        parts = list(self._parameters(lark, tool, properties, required, shared))
        return " ".join([*parts, lark.literal(f"\n{self.parameters.ending}")])

    def _parameters(
        self,
        lark: Lark,
        tool: Tool,
        properties: Mapping[str, Any],
        required: list[Any],
        shared: dict[str, Any],
    ) -> Iterator[str]:
        for name, schema in properties.items():
            if not regex.fullmatch(_PARAMETER, name):
                raise DataError(f"the parameter {name!r} cannot be written in the format {self.name}")
            line = "\n" * self.parameters.has_lines
            begin = lark.literal(f"\n{self.parameters.before.replace(NAME, name)}{line}")
            value = self._value(lark, tool, name, schema, f"{line}{self.parameters.after}", shared)
            yield f"{begin} {value}" if name in required else f"({begin} {value})?"

    def _value(
        self, lark: Lark, tool: Tool, name: str, schema: Any, after: str, shared: dict[str, Any]
    ) -> str:
        end = lark.literal(after)
        if tool.type_of(name) != "string":
            whole = {**shared, **schema} if isinstance(schema, Mapping) else schema
            json_value = lark.json({"allOf": [whole]} if isinstance(whole, bool) else whole, tool.strict)
            return f"{lark.rule(lark.new('value'), json_value)} {end}"
        if (unknown := sorted(schema.keys() - _ENFORCED)) and tool.strict:
            raise DataError(
                f"{unknown[0]!r} of the string {name!r} cannot be enforced in the format {self.name}"
            )
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise DataError(f"expected the values of the string {name!r} to be a list of strings")
        if values:
            return f"({' | '.join(lark.literal(value) or quoted('') for value in values)}) {end}"
        return lark.until(lark.new("value"), after)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """A value that is not a string, as JSON; a string of it where it is none."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_refused)
    except (ValueError, RecursionError):
        return _PYTHON.get(value) or json.dumps(text, ensure_ascii=False)
    return value


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
