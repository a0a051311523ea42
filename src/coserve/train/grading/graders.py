"""Graders that need nothing but the answer: string checks, regular expressions, JSON schemas, Python.

A grader is settings, checked when they are made, and `grade(answer, item)`, which any thread may call;
`item` is the record's reference. To add one, write its class and name it in `GRADERS`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Protocol

import jsonschema_rs

from coserve.adapters.patterns import check_patterns, full_matches
from coserve.errors import AdapterError, ConfigError, JobError
from coserve.train.grading.template import ANSWER, Template

_OPERATIONS: Final = ("eq", "ne", "like", "ilike")
_MOST_SCHEMA: Final = 1 << 16  # characters
_DEEPEST: Final = 64  # levels of a schema
_PROGRAM: Final = 1 << 20  # bytes of a pattern's program in a schema


class Grader(Protocol):
    """Grades answers."""

    def check(self, item: Mapping[str, Any]) -> None:
        """Raises DataError for a record that cannot be graded."""
        ...

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """The reward of an answer. Raises CoserveError where there is none."""
        ...


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
    """1 if `pattern` matches all of `input`, else 0. It is matched in linear time by RE2
    (`adapters.patterns`); `(?s).*` before and after it finds it anywhere."""

    type: ClassVar[str] = "regex"
    pattern: str
    input: str = ANSWER
    name: str = ""
    _template: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ConfigError("the grader's pattern must be a text")
        try:
            check_patterns("grader.pattern", (self.pattern,))
        except AdapterError as error:
            raise ConfigError(str(error)) from error
        object.__setattr__(self, "_template", Template(self.input, "the grader's input"))

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""
        self._template.check(item)

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        text = self._template.render(answer, item).encode(errors="replace").decode()
        return float(bool(full_matches("grader.pattern", self.pattern, (text,))))


@dataclass(frozen=True)
class JsonSchemaGrader:
    """1 if the answer is JSON that `schema` accepts, else 0. A schema refers to no other one: `$ref` would
    let it call itself without end, or ask other hosts."""

    type: ClassVar[str] = "json_schema"
    schema: Mapping[str, Any]
    name: str = ""
    _validator: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Mapping):
            raise ConfigError("the grader's schema must be an object")
        _check_schema(self.schema, "the grader's schema", 0)
        text = json.dumps(self.schema)
        if len(text) > _MOST_SCHEMA:
            raise ConfigError(f"the grader's schema may have {_MOST_SCHEMA} characters, not {len(text)}")
        linear = jsonschema_rs.RegexOptions(size_limit=_PROGRAM, dfa_size_limit=_PROGRAM)
        try:
            found = jsonschema_rs.validator_for(json.loads(text), pattern_options=linear, offline=True)
        except (ValueError, jsonschema_rs.ValidationError) as error:
            raise ConfigError(f"the grader's schema cannot be used: {str(error)[:200]}") from error
        object.__setattr__(self, "_validator", found)

    def check(self, item: Mapping[str, Any]) -> None:
        """See `Grader`."""

    def grade(self, answer: str, item: Mapping[str, Any]) -> float:
        """See `Grader`."""
        try:
            return float(self._validator.is_valid(json.loads(answer)))
        except (ValueError, RecursionError):
            return 0.0


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
    """The reward as a number. Raises JobError for anything else."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise JobError(f"{what} must give a finite number, not {str(value)[:80]!r}")


def grader_from(
    settings: Mapping[str, Any], kinds: Mapping[str, Callable[..., Grader]], **operators: object
) -> Grader:
    """A grader from plain fields, of one of these `kinds`. Fields in `operators` are the operator's to set.
    Raises ConfigError."""
    if not isinstance(settings, Mapping):
        raise ConfigError("the grader must be an object with a type")
    given = dict(settings)
    name = given.pop("type", None)
    if not isinstance(name, str) or (kind := kinds.get(name)) is None:
        raise ConfigError(f"there is no grader {name!r}, only {', '.join(kinds)}")
    of_kind = [one.name for one in fields(kind) if one.init]  # type: ignore[arg-type]
    known = [field for field in of_kind if field not in operators]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"the grader {name!r} has no field {unknown[0]!r}, only {', '.join(known)}")
    try:
        return kind(**given, **{name: operators[name] for name in of_kind if name in operators})
    except TypeError as error:
        raise ConfigError(f"the grader {name!r}: {str(error).partition(') ')[2] or error}") from error


def _check_schema(value: object, what: str, depth: int) -> None:
    """Raises ConfigError for a reference, and for a schema that is nested too deeply."""
    if depth > _DEEPEST:
        raise ConfigError(f"{what} may have {_DEEPEST} levels")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef", "$schema", "$id"):
                raise ConfigError(f"{what} has {key!r}: write out what it stands for")
            _check_schema(inner, what, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_schema(inner, what, depth + 1)


GRADERS: Final[Mapping[str, Callable[..., Grader]]] = {
    kind.type: kind for kind in (StringCheckGrader, RegexGrader, JsonSchemaGrader)
}
