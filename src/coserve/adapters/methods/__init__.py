"""Adapter methods: one file each. Each file in this folder that defines `METHOD` is registered as a
method."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from coserve.adapters.method import Method
from coserve.adapters.peft_types import INSTEAD
from coserve.adapters.saved import shown
from coserve.errors import AdapterError


@cache
def methods() -> Mapping[str, Method]:
    """Every method by its name."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.METHOD for module in modules if hasattr(module, "METHOD")]
    return {method.name: method for method in found}


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


def method_in_file(peft_type: object) -> Method:
    """The method of a file's `peft_type`. Raises AdapterError; for a type of PEFT's that there is no method
    for, with what to use instead."""
    for method in methods().values():
        if method.peft_type == peft_type:
            return method
    if isinstance(peft_type, str) and (instead := INSTEAD.get(peft_type)) is not None:
        raise AdapterError(f"peft_type {peft_type!r} is not supported: {instead}")
    known = ", ".join(sorted(method.peft_type for method in methods().values()))
    raise AdapterError(f"peft_type {shown(peft_type)} is not supported, only {known}")
