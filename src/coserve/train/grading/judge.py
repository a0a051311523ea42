"""The parts of graders that are a tenant's programs, regular expressions and JSON schemas; called in a
sandbox (`judging.py`). Both are matched in C and Rust that hold the interpreter's lock."""

import json
from functools import lru_cache
from typing import Any, Final

import jsonschema_rs

from coserve.adapters.patterns import linear_pattern
from coserve.errors import AdapterError, ConfigError

_PATTERN: Final = 1 << 19  # bytes of a pattern's program and its states: compiled in 0.1 s
_SCHEMA_PATTERN: Final = 1 << 18  # of each pattern in a schema
_REMEMBERED: Final = 16  # programs


def judge(kind: str, program: str, text: str | None) -> bool:
    """Tells whether the program accepts a text: "regex" matches all of it, "json_schema" accepts it as
    JSON. None only compiles the program. Raises ConfigError for a program that cannot be used."""
    if kind == "regex":
        pattern = _pattern(program)
        return text is not None and pattern.fullmatch(text.encode(errors="replace")) is not None
    schema = _schema(program)
    if text is None:
        return False
    try:
        return bool(schema.is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


@lru_cache(_REMEMBERED)
def _pattern(pattern: str) -> Any:
    try:
        return linear_pattern("grader.pattern", pattern, _PATTERN)
    except AdapterError as error:
        raise ConfigError(str(error)) from error


@lru_cache(_REMEMBERED)
def _schema(text: str) -> Any:
    linear = jsonschema_rs.RegexOptions(size_limit=_SCHEMA_PATTERN, dfa_size_limit=_SCHEMA_PATTERN)
    try:
        return jsonschema_rs.validator_for(json.loads(text), pattern_options=linear, offline=True)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        raise ConfigError(f"the grader's schema cannot be used: {str(error)[:200]}") from error
