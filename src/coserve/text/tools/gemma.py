"""FunctionGemma and Gemma 4: `call:name{key:value,...}` between control tokens, strings between marks of
their own, keys without any."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from coserve.errors import DataError
from coserve.text.pending import begun
from coserve.text.tools.format import ArgumentReader, random_id
from coserve.text.tools.lark import Lark, quoted
from coserve.text.tools.syntax import NAME, Syntax
from coserve.text.tools.tool import Tool

_ENDS: Final = ",}]"  # of a value that is no string
_KEY: Final = r"/[^\s:,{}\[\]<>\"]+/"
_SCALARS: Final = frozenset({"integer", "number", "boolean", "null"})
_NOTES: Final = frozenset({"type", "description", "title", "default", "examples"})
_STRING: Final = _NOTES | {"enum", "const"}
_ARRAY: Final = _NOTES | {"items"}
_OBJECT: Final = _NOTES | {"properties", "required", "additionalProperties"}


class GemmaReader:
    """Reads arguments, whose opening bracket is before the text, as JSON. Strings are told as they arrive,
    other values and keys once they are over."""

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark, ""
        self._open = ["}"]  # closing brackets of what is open
        self._in_string, self._is_key = False, True
        self._opening = "{"  # until it is told

    def push(self, text: str) -> tuple[str, str | None]:
        """See `ArgumentReader`."""
        self._held += text
        told, self._opening = [self._opening], ""
        while (piece := self._next()) is not None:
            told.append(piece)
            if not self._open:
                rest, self._held = self._held, ""
                return "".join(told), rest
        return "".join(told), None

    def finish(self) -> str:
        """See `ArgumentReader`."""
        if self._in_string:
            return _escaped(self._held[: len(self._held) - begun(self._mark, self._held)])
        return "" if self._is_key or begun(self._mark, self._held) else self._held.strip()

    def _next(self) -> str | None:
        """The JSON of what comes next; None where more text has to come first."""
        held = self._held
        if self._in_string:
            place = held.find(self._mark)
            end = len(held) - begun(self._mark, held) if place < 0 else place
            if place < 0:
                self._held = held[end:]
                return _escaped(held[:end]) if end else None
            self._held, self._in_string = held[place + len(self._mark) :], False
            return f'{_escaped(held[:end])}"'
        held = self._held = held.lstrip()
        if not held or (len(held) < len(self._mark) and self._mark.startswith(held)):
            return None
        if self._is_key and held[0] != "}":
            return self._key()
        if held.startswith(self._mark):
            self._held, self._in_string = held.removeprefix(self._mark), True
            return '"'
        match held[0]:
            case "{" | "[":
                self._open.append("}" if held[0] == "{" else "]")
                self._is_key = held[0] == "{"
            case "}" | "]":
                self._open.pop()
                self._is_key = False
            case ",":
                self._held, self._is_key = held[1:], self._open[-1] == "}"
                return ", "
            case _:
                return self._bare()
        self._held = held[1:]
        return held[0]

    def _key(self) -> str | None:
        """A key with its colon; one without a value is null."""
        text = self._until(f":{_ENDS}")
        if text is None:
            return None
        self._is_key, key = False, json.dumps(text.removeprefix(self._mark).removesuffix(self._mark))
        if not self._held.startswith(":"):
            return f"{key}: null"
        self._held = self._held[1:]
        return f"{key}: "

    def _until(self, signs: str) -> str | None:
        """Takes the text before the first of these signs; None as long as there is none."""
        end = min((place for sign in signs if (place := self._held.find(sign)) >= 0), default=-1)
        if end < 0:
            return None
        text, self._held = self._held[:end].strip(), self._held[end:]
        return text

    def _bare(self) -> str | None:
        text = self._until(_ENDS)
        if text is None:
            return None
        try:
            json.loads(text, parse_constant=_refused)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        return text


@dataclass(frozen=True)
class GemmaCalls:
    """A format whose strings stand between two of the same `mark`."""

    name: str
    syntax: Syntax
    mark: str

    def new_id(self) -> str:
        """See `ToolFormat`."""
        return f"call_{random_id(24)}"

    def arguments(self, tool: Tool) -> ArgumentReader:
        """See `ToolFormat`."""
        return GemmaReader(self.mark)

    def grammar(self, lark: Lark, tool: Tool) -> str:
        """See `ToolFormat`. Keys are in the order of the alphabet, as templates write them."""
        return _Grammar(lark, self.mark, tool.strict).object({"type": "object", **tool.parameters})


class _Grammar:
    """Expressions for values of JSON schemas."""

    def __init__(self, lark: Lark, mark: str, strict: bool) -> None:
        self._lark, self._mark, self._strict = lark, mark, strict
        self._any = ""

    def object(self, schema: Mapping[str, Any]) -> str:
        """The members of an object and its closing bracket."""
        self._check(schema, _OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise DataError('expected "properties" to be an object and "required" a list')
        if not properties and schema.get("additionalProperties", True) is not False:
            return self._lark.rule(self._lark.new("object"), self._free_object(self._anything()))
        after, alone = quoted("}"), quoted("}")
        for name in sorted(properties, key=str.lower, reverse=True):
            member = f"{quoted(f'{name}:')} {self._value(properties[name])}"
            is_needed = name in required
            first = f"{member} {after}" if is_needed else f"{member} {after} | {alone}"
            later = f"{quoted(',')} {member} {after}" if is_needed else f"({quoted(',')} {member})? {after}"
            after, alone = (self._lark.rule(self._lark.new("members"), each) for each in (later, first))
        return alone

    def _value(self, schema: Any) -> str:
        given = schema if isinstance(schema, Mapping) else {}
        kind = Tool("", {"properties": {"value": given}}).type_of("value")
        if kind == "string":
            self._check(given, _STRING)
            return self._string([given["const"]] if "const" in given else given.get("enum", []))
        if kind in _SCALARS:
            return self._lark.rule(self._lark.new("value"), self._lark.json(given, self._strict))
        if kind == "array":
            self._check(given, _ARRAY)
            item = self._lark.rule(self._lark.new("item"), self._value(given.get("items", {})))
            return f"{quoted('[')} ({item} ({quoted(',')} {item})*)? {quoted(']')}"
        if kind == "object":
            return f"{quoted('{')} {self.object(given)}"
        self._check(given, _NOTES)
        return self._anything()

    def _string(self, values: Any) -> str:
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise DataError("expected the values of a string to be a list of strings")
        mark = self._lark.literal(self._mark)
        if not values:
            return f"{mark} {self._lark.until(self._lark.new('value'), self._mark)}"
        texts = " | ".join(self._lark.literal(value) or quoted("") for value in values)
        return f"{mark} ({texts}) {mark}"

    def _anything(self) -> str:
        """A rule for any value."""
        if not self._any:
            name = self._any = self._lark.new("any")
            scalar = self._lark.json({"type": sorted(_SCALARS)}, strict=False)
            kinds = [
                self._string([]),
                self._lark.rule(f"{name}_scalar", scalar),
                f"{quoted('[')} ({name} ({quoted(',')} {name})*)? {quoted(']')}",
                f"{quoted('{')} {self._free_object(name)}",
            ]
            self._lark.rule(name, " | ".join(kinds))
        return self._any

    def _free_object(self, value: str) -> str:
        member = f"{_KEY} {quoted(':')} {value}"
        return f"({member} ({quoted(',')} {member})*)? {quoted('}')}"

    def _check(self, schema: Mapping[str, Any], enforced: frozenset[str]) -> None:
        if self._strict and (unknown := sorted(schema.keys() - enforced)):
            raise DataError(f"{unknown[0]!r} cannot be enforced in a format of Gemma's")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _calls(name: str, opening: str, closing: str, mark: str) -> GemmaCalls:
    return GemmaCalls(name, Syntax(before=f"{opening}call:{NAME}{{", after=closing, marks=(mark,)), mark)


FUNCTION_GEMMA: Final = _calls("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4: Final = _calls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
