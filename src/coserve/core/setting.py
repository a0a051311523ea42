"""Notes in the annotations of settings' fields, beside their types: the range of a number, and the flag that
gives it on the command line."""

import math
import sys
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from coserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a setting, by its help, in which `{default}` is the field's; `--` and the field's name
    unless it has a `name`."""

    help: str
    metavar: str | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Hot:
    """The setting of a server that runs can be changed: SIGHUP has it read again."""


@dataclass(frozen=True, slots=True)
class Secret:
    """The setting's URLs are secrets as a whole: whoever knows one can use it."""


@dataclass(frozen=True, slots=True)
class Range:
    """A finite number from `least`, or `above` it, to `most`."""

    least: float
    most: float = sys.float_info.max
    above: bool = False

    def __str__(self) -> str:
        if self.most < sys.float_info.max:
            return f"between {self.least:g} and {self.most:g}"
        return f"{'above' if self.above else 'at least'} {self.least:g}"

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)


@cache
def noted(kind: type, note: type[T]) -> dict[str, T]:
    """The fields of a dataclass whose annotations have a note of this class."""
    hints: dict[str, Any] = get_type_hints(kind, include_extras=True)
    return {
        field.name: found
        for field in fields(kind)
        if get_origin(hints[field.name]) is Annotated
        for found in get_args(hints[field.name])
        if isinstance(found, note)
    }


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raises ConfigError for a field of a dataclass that is out of its range; None is in any."""
    for name, bounds in noted(settings.__class__, Range).items():
        value = getattr(settings, name)
        if value is not None and value not in bounds:
            finite = " and finite" if value == math.inf else ""
            raise ConfigError(f"{prefix}{name} must be {bounds}{finite}, not {value}")
