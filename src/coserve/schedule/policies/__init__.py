"""The papers' strategies, one file each. A new file here adds a strategy without other changes."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, Final, get_args

import msgspec

from coserve.errors import ConfigError
from coserve.schedule.policies.base import POLICIES, Allowance, Policy, View, register

__all__ = ["POLICIES", "Allowance", "Policy", "View", "make_policy", "register"]

_KINDS: Final[dict[Any, str]] = {int: "a whole number", float: "a number", bool: "true or false"}

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def make_policy(name: str, **options: object) -> Policy:
    """The policy registered as `name`, built with its own options.

    Options follow the name, by position or by name: `temporal:5`, `temporal:5,grain=batch`. Raises
    ConfigError.
    """
    name, _, written = name.partition(":")
    if name == "isolated":
        raise ConfigError(
            "isolation is not a policy of one engine: run one server for answers and one for training, each "
            "on processors or GPUs of its own (`coserve bench policies` compares it with the others)"
        )
    if name not in POLICIES:
        raise ConfigError(f"there is no policy '{name}'; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](**_options(name, [*_written(name, written), *options.items()]))


def _written(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Parses options after the name, as text by option name."""
    known = list(inspect.signature(POLICIES[name]).parameters)
    for place, part in enumerate(filter(None, text.split(","))):
        key, equals, value = part.partition("=")
        if equals:
            yield key, value
        elif place < len(known):
            yield known[place], part
        else:
            listed = f" ({', '.join(known)})" if known else ""
            raise ConfigError(f"policy '{name}' takes {len(known)} options{listed}, not {part!r} too")


def _options(name: str, given: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Options in the types of the policy's fields. Raises ConfigError for duplicates and wrong types."""
    known = inspect.signature(POLICIES[name]).parameters
    taken: dict[str, Any] = {}
    for key, value in given:
        if key not in known:
            raise ConfigError(
                f"policy '{name}' does not take the option '{key}'; it takes {', '.join(known) or 'none'}"
            )
        if key in taken:
            raise ConfigError(f"policy '{name}' is given its {key} twice")
        wanted = known[key].annotation
        try:
            taken[key] = msgspec.convert(value, wanted, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"policy '{name}' needs {_said(wanted)} for {key}, not {value!r}") from error
    return taken


def _said(wanted: Any) -> str:
    kinds = [kind for kind in get_args(wanted) or (wanted,) if kind is not NoneType]
    return " or ".join(_KINDS.get(kind, str(kind)) for kind in kinds)
