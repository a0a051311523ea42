"""Parses options of `coserve simulate`."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.core.request import SLO
    from coserve.simulate.advise import Wanted


def read_slo(text: str) -> "SLO":
    """Parses bounds. Raises ConfigError."""
    from coserve.core.request import SLO

    short = {"ttft": "first_token", "tpot": "between_tokens", "e2e": "end_to_end"}
    known = ("first_token", "between_tokens", "end_to_end", "deferral", "slowdown")
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = short.get(name.strip(), name.strip())
        if name not in known:
            raise ConfigError(f"--slo: there is no bound {name!r}; there are {', '.join(known)}")
        found[name] = _number("--slo", name, value)
    return SLO(**found)


def read_settings(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parses settings of the scheduler, each with one value or several. Raises ConfigError."""
    from dataclasses import fields

    from coserve.schedule.config import SET_BY_ENGINE, SchedulerConfig

    types = {one.name: str(one.type) for one in fields(SchedulerConfig)}
    known = types.keys() - SET_BY_ENGINE
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"--setting: there is no setting {name!r}; there are {', '.join(sorted(known))}"
            )
        found[name] = [_number("--setting", name, value) for value in values.split(",")]
        if "int" in types[name] and any(type(value) is not int for value in found[name]):
            raise ConfigError(f"--setting: {name} needs a whole number, not {values!r}")
    return found


def _number(flag: str, name: str, text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        found = float(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {name} needs a number, not {text!r}") from error
    if not isfinite(found):
        raise ConfigError(f"{flag}: {name} needs a finite number, not {text!r}")
    return found


def read_wanted(
    within: float, training: float, most: int, prices: Sequence[str], hardware: Sequence[str]
) -> "Wanted":
    """The demands on a fleet, with the prices of the given `hardware`. Raises ConfigError."""
    from coserve.simulate.advise import Wanted

    if not 0 < within <= 1:
        raise ConfigError(f"--within is a share of requests, above 0 and at most 1, not {within:g}")
    if not 0 <= training < float("inf"):
        raise ConfigError(f"--training is a number of tokens a second, not {training:g}")
    found = {}
    for text in prices:
        name, _, value = text.partition("=")
        if name not in hardware:
            raise ConfigError(f"--price: {name!r} is not among the hardware: {', '.join(hardware)}")
        found[name] = _number("--price", name, value)
        if not 0 < found[name] < float("inf"):
            raise ConfigError(f"--price: {name} needs a positive price, not {value}")
    return Wanted(within, training, most, found)
