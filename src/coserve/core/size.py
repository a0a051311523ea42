"""Parses and formats sizes in bytes."""

import math
import re
from collections.abc import Mapping
from typing import Final

from coserve.errors import ConfigError

_POWERS: Final = ("", "K", "M", "G", "T")
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def read_size(text: str) -> int:
    """Bytes of "6GiB", "500 MB" or "1073741824": binary prefixes with an i, decimal without.

    Raises ConfigError for anything else.
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"expected a number of bytes such as 6GiB or 500MB, not {text!r}")
    number, power, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS.index(power.upper()))


def read_memory(
    memory: str | int | float, name: str = "memory", may_be_none: bool = False
) -> int | float | None:
    """`EngineConfig.memory`, or the field called `name`, as bytes (int) or a share of the device's memory
    (float); None for "auto". No bytes are an error unless it `may_be_none`.

    Shares may be written as 0.5 or as "50%". Raises ConfigError for anything else.
    """
    if memory == "auto":
        return None
    if isinstance(memory, str):
        number = re.fullmatch(r"(\d+(?:\.\d+)?)%|(0?\.\d+|1\.0+)", memory.strip())
        if number is not None:
            memory = float(number[1]) / 100 if number[1] else float(number[2])
        else:
            try:
                memory = read_size(memory)
            except ConfigError as error:
                raise ConfigError(f"engine.{name}: {error}, a share such as 0.5, or auto") from error
    if memory < 0 or (memory == 0 and not may_be_none) or (isinstance(memory, float) and memory > 1):
        raise ConfigError(f"engine.{name} must be positive, and a share at most 1, not {memory}")
    return memory


def show_size(nbytes: float, up: bool = False) -> str:
    """Bytes in the largest fitting unit, "1.25 GiB", "820 MiB", with three digits: rounded, or `up`, so that
    what is shown is enough where `nbytes` are needed."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(_POWERS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    if up:
        places = 10 ** max(3 - len(str(int(nbytes))), 0)
        nbytes = math.ceil(nbytes * places) / places
    if power == 0:
        return f"{nbytes:.0f} bytes"
    return f"{nbytes:.3g} {_POWERS[power]}iB" if abs(nbytes) < 1000 else f"{nbytes:.0f} {_POWERS[power]}iB"


def show_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes with their names, the largest first; those of no bytes are left out."""
    largest = sorted(((nbytes, name) for name, nbytes in sizes.items() if nbytes), reverse=True)
    return ", ".join(f"{name} {show_size(nbytes)}" for nbytes, name in largest)
