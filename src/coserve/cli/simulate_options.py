"""Parses options of `coserve simulate`."""

from collections.abc import Sequence
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

    known = {field.name for field in fields(SchedulerConfig)} - SET_BY_ENGINE
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"--setting: there is no setting {name!r}; there are {', '.join(sorted(known))}"
            )
        found[name] = [_number("--setting", name, value) for value in values.split(",")]
    return found


def _number(flag: str, name: str, text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {name} needs a number, not {text!r}") from error


def read_wanted(
    within: float, training: float, most: int, prices: Sequence[str], hardware: Sequence[str]
) -> "Wanted":
    """What a fleet is to hold, with the prices of the `hardware` that is asked for. Raises ConfigError."""
    from coserve.simulate.advise import Wanted

    if not 0 < within <= 1:
        raise ConfigError(f"--within is a share of requests, above 0 and at most 1, not {within:g}")
    found = {}
    for text in prices:
        name, _, value = text.partition("=")
        if name not in hardware:
            raise ConfigError(f"--price: {name!r} is not among the hardware: {', '.join(hardware)}")
        found[name] = _number("--price", name, value)
        if not 0 < found[name] < float("inf"):
            raise ConfigError(f"--price: {name} needs a positive price, not {value}")
    return Wanted(within, training, most, found)
