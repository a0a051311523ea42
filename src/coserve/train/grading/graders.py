"""Graders that need nothing but the answer: string checks, regular expressions, JSON schemas, Python; and
graders from their settings.

A grader is settings, checked when they are made, and `grade(answer, item)`, which any thread may call;
`item` is the record's reference. To add one, write its class and name it in `GRADERS`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Protocol

from coserve.core.ranges import shown
from coserve.errors import ConfigError, JobError
from coserve.train.grading.judging import accepts, check_program
from coserve.train.grading.template import ANSWER, Template

_OPERATIONS: Final = ("eq", "ne", "like", "ilike")
_MOST_SCHEMA: Final = 1 << 16  # characters
_DEEPEST: Final = 64  # levels of a schema
MOST_REWARD: Final = 1e6  # in size: advantages and their gradients stay within float32
MOST_NESTED: Final = 16  # graders of a grader
_MOST_PATTERNS: Final = 32  # of a schema
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id"})
_REFUSED: Final[Mapping[str, str]] = {
    "python": "it would run a tenant's code in the engine's process: use the type http, or PythonGrader in "
    "the Python API",
    "endpoint": "its name here is http",
}
_EXPONENTIAL: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})


class Grader(Protocol):
    """Grades answers."""

    def check(self, item: Mapping[str, Any]) -> None:
        """Raises DataError for a record that cannot be graded."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """The reward of an answer. Raises CoserveError where there is none."""


@dataclass(frozen=True)
class StringCheckGrader:
    """1 if `input` and `reference`, both templates, compare as `operation` says, else 0: `eq` and `ne` whole
    texts, `like` finds the reference in the input, `ilike` whatever its case."""

    type: ClassVar[str] = "string_check"
    reference: str
    operation: str = "eq"
    input: str = ANSWER
    name: str = ""
    _templates: tuple[Template, Template] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS:
            raise ConfigError(
                f"the grader's operation is one of {', '.join(_OPERATIONS)}, not {self.operation!r}"
            )
        pair = Template(self.input, "the grader's input"), Template(self.reference, "the grader's reference")
        object.__setattr__(self, "_templates", pair)

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        for template in self._templates:
            template.check(item)

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        found, wanted = (template.render(answer, item) for template in self._templates)
        match self.operation:
            case "eq":
                holds = found == wanted
            case "ne":
                holds = found != wanted
            case "like":
                holds = wanted in found
            case _:
                holds = wanted.casefold() in found.casefold()
        return float(holds)


@dataclass(frozen=True)
class RegexGrader:
    """1 if `pattern` matches all of `input`, else 0. It is matched in linear time by RE2, in a sandbox;
    `(?s).*` before and after it finds it anywhere."""

    type: ClassVar[str] = "regex"
    pattern: str
    input: str = ANSWER
    name: str = ""
    _template: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ConfigError("the grader's pattern must be a text")
        check_program(self.type, self.pattern)
        object.__setattr__(self, "_template", Template(self.input, "the grader's input"))

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        self._template.check(item)

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        text = self._template.render(answer, item).encode(errors="replace").decode()
        return float(accepts(self.type, self.pattern, text))


@dataclass(frozen=True)
class JsonSchemaGrader:
    """1 if the answer is JSON that `schema` accepts, else 0.

    A schema refers to no other one: `$ref` would let it call itself without end, or ask other hosts. It has
    no `unevaluatedProperties`: each evaluates what is within once more, so thirty levels of them take
    days. And it has few regular expressions. Answers are judged in a sandbox.
    """

    type: ClassVar[str] = "json_schema"
    schema: Mapping[str, Any]
    name: str = ""
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Mapping):
            raise ConfigError("the grader's schema must be an object")
        patterns = _check_schema(self.schema, "the grader's schema", 0)
        if patterns > _MOST_PATTERNS:
            raise ConfigError(
                f"the grader's schema has {patterns} regular expressions, and may have {_MOST_PATTERNS}"
            )
        text = json.dumps(self.schema)
        if len(text) > _MOST_SCHEMA:
            raise ConfigError(f"the grader's schema may have {_MOST_SCHEMA} characters, not {len(text)}")
        check_program(self.type, text)
        object.__setattr__(self, "_text", text)

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        return float(accepts(self.type, self._text, answer.encode(errors="replace").decode()))


@dataclass(frozen=True)
class PythonGrader:
    """The reward that a function of (answer, item) returns. For the Python API alone: no server runs a
    tenant's code."""

    type: ClassVar[str] = "python"
    function: Callable[[str, Mapping[str, Any]], float]
    name: str = ""

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        try:
            return checked_reward(self.function(answer, item), "the grader")
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"the grader failed: {type(error).__name__}: {error}") from error


def checked_reward(value: object, what: str) -> float:
    """The reward as a number, at most MOST_REWARD in size. Raises JobError for anything else."""
    if isinstance(value, bool | int | float) and -MOST_REWARD <= value <= MOST_REWARD:
        return float(value)
    raise JobError(
        f"{what} must give a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}, not {shown(value)}"
    )


def grader_from(
    settings: Mapping[str, Any], kinds: Mapping[str, Callable[..., Grader]], **operators: object
) -> Grader:
    """A grader from plain fields, of one of these `kinds`; the field that a kind names as `nested` has
    graders by name. Fields in `operators` are the operator's to set. Raises ConfigError."""
    if not isinstance(settings, Mapping):
        raise ConfigError("the grader must be an object with a type")
    given = dict(settings)
    name = given.pop("type", None)
    if not isinstance(name, str) or (kind := kinds.get(name)) is None:
        reason = _REFUSED.get(name) if isinstance(name, str) else None
        raise ConfigError(
            f"there is no grader {name!r:.80}{f': {reason}' if reason else ''}; there are {', '.join(kinds)}"
        )
    of_kind = [one.name for one in fields(kind) if one.init]  # type: ignore[arg-type]
    known = [field for field in of_kind if field not in operators]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"the grader {name!r} has no field {unknown[0]!r}, only {', '.join(known)}")
    nested = getattr(kind, "nested", None)
    if nested is not None and isinstance(parts := given.get(nested), Mapping):
        given[nested] = _nested(parts, kinds, operators)
    try:
        return kind(**given, **{name: operators[name] for name in of_kind if name in operators})
    except TypeError as error:
        raise ConfigError(f"the grader {name!r}: {str(error).partition(') ')[2] or error}") from error


def _nested(
    parts: Mapping[str, Any], kinds: Mapping[str, Callable[..., Grader]], operators: Mapping[str, object]
) -> dict[str, Grader]:
    """Graders within one, by name; one level of them. Raises ConfigError."""
    flat = {name: kind for name, kind in kinds.items() if not hasattr(kind, "nested")}
    if len(parts) > MOST_NESTED:
        raise ConfigError(f"a grader may have {MOST_NESTED} graders, not {len(parts)}")
    made = {}
    for name, settings in parts.items():
        try:
            made[name] = grader_from(settings, flat, **operators)
        except ConfigError as error:
            raise ConfigError(f"{name!r:.80}: {error}") from error
    return made


def _check_schema(value: object, what: str, depth: int) -> int:
    """The number of regular expressions in a schema. Raises ConfigError for a reference, for what takes
    exponential time, and for a schema that is nested too deeply."""
    if depth > _DEEPEST:
        raise ConfigError(f"{what} may have {_DEEPEST} levels")
    if isinstance(value, list | tuple):
        return sum(_check_schema(inner, what, depth + 1) for inner in value)
    if not isinstance(value, Mapping):
        return 0
    patterns = 0
    for key, inner in value.items():
        if key in _REFERENCES:
            raise ConfigError(f"{what} has {key!r}: write out what it stands for")
        if key in _EXPONENTIAL:
            instead = key.replace("unevaluatedP", "additionalP").replace("unevaluatedI", "i")
            raise ConfigError(f"{what} has {key!r}, which takes exponential time: use {instead!r}")
        patterns += key == "pattern" and isinstance(inner, str)
        patterns += len(inner) if key == "patternProperties" and isinstance(inner, Mapping) else 0
        patterns += _check_schema(inner, what, depth + 1)
    return patterns


GRADERS: Final[Mapping[str, Callable[..., Grader]]] = {
    kind.type: kind for kind in (StringCheckGrader, RegexGrader, JsonSchemaGrader)
}
