"""Adapter methods: one file each. Each file in this folder that defines `METHOD` is registered as a
method, and each that defines `READER` reads files of another type as adapters of these methods."""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from coserve.adapters.method import FileReader, Method
from coserve.adapters.peft_types import INSTEAD
from coserve.adapters.saved import shown
from coserve.errors import AdapterError


@cache
def methods() -> Mapping[str, Method]:
    """Every method by its name."""
    return {method.name: method for method in _defined("METHOD")}


@cache
def readers() -> Mapping[str, FileReader]:
    """Readers of files by their `peft_type`: all methods, and those of other types."""
    return {reader.peft_type: reader for reader in (*methods().values(), *_defined("READER"))}


def _defined(name: str) -> list[Any]:
    """The objects that files of this folder define by this name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return [getattr(module, name) for module in modules if hasattr(module, name)]


def method_named(name: object) -> Method:
    """The method of this name. Raises AdapterError for an unknown one."""
    if not isinstance(name, str) or name not in methods():
        instead = INSTEAD.get(name.upper()) if isinstance(name, str) else None
        if instead is not None:
            raise AdapterError(f"there is no adapter method {name!r}: {instead}")
        raise AdapterError(f"there is no adapter method {shown(name)}, only {', '.join(sorted(methods()))}")
    return methods()[name]


def method_of(config: object) -> Method:
    """The method of these settings. Raises AdapterError."""
    for method in methods().values():
        if type(config) is method.config:
            return method
    raise AdapterError(f"{type(config).__name__} are no settings of an adapter method")


def method_of_type(peft_type: object) -> Method:
    """The method of this `peft_type`. Raises AdapterError; for a type of PEFT's that there is no method for,
    with what to use instead."""
    for method in methods().values():
        if method.peft_type == peft_type:
            return method
    raise _unknown(peft_type, [method.peft_type for method in methods().values()])


def reader_of(peft_type: object) -> FileReader:
    """The reader of files of this `peft_type`. Raises AdapterError as `method_of_type` does."""
    if isinstance(peft_type, str) and peft_type in readers():
        return readers()[peft_type]
    raise _unknown(peft_type, readers())


def _unknown(peft_type: object, known: Iterable[str]) -> AdapterError:
    if isinstance(peft_type, str) and (instead := INSTEAD.get(peft_type)) is not None:
        return AdapterError(f"peft_type {peft_type!r} is not supported: {instead}")
    return AdapterError(f"peft_type {shown(peft_type)} is not supported, only {', '.join(sorted(known))}")
