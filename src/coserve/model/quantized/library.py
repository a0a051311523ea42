"""Access to bitsandbytes, which makes and multiplies the four-bit format; loaded on first use."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from coserve.errors import ConfigError

_BACKEND = "bitsandbytes.backends.cpu.ops"


@cache
def bitsandbytes() -> ModuleType:
    """The functions of bitsandbytes. Raises ConfigError where it is not installed or cannot be loaded."""
    try:
        with _without_downloads():
            return importlib.import_module("bitsandbytes.functional")
    except (ImportError, OSError, RuntimeError) as error:  # no such package, or a library in it that fails
        raise ConfigError(
            "engine.quantize '4bit' needs bitsandbytes, which cannot be loaded "
            f"(pip install 'coserve[quantized]'): {error}"
        ) from error


@contextmanager
def _without_downloads() -> Iterator[None]:
    """Hides the package `kernels`, with which bitsandbytes would fetch and run code from the hub on
    import."""
    missing = object()
    before = sys.modules.get("kernels", missing)
    log = logging.getLogger(_BACKEND)
    level = log.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        if before is missing:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = before  # type: ignore[assignment]
