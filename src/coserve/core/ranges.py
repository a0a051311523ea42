"""Ranges of numeric settings, checked where a setting becomes a record: one sentence names the field."""

from typing import Final

from coserve.errors import ConfigError, CoserveError

LARGEST: Final = 1e20  # of rates: float32, which ends at 3e38, holds one over the smallest 1 - beta
SMALLEST: Final = 1e-30  # of what is divided by: float32 has no smaller normal numbers than 1e-38
BELOW_ONE: Final = 1.0 - 2.0**-53  # the largest number below one
MOST_DECAY: Final = 1e6
MOST_COUNT: Final = (1 << 63) - 1


def check_range(
    field: str,
    value: object,
    least: float,
    most: float,
    kind: type[int] | type[float] = float,
    error: type[CoserveError] = ConfigError,
) -> None:
    """Raises `error` for a setting that is no number of this kind from `least` to `most`; a truth value and
    NaN are none."""
    kinds = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise error(f"{field} must be {what} from {least:g} to {most:g}, not {shown(value)}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ConfigError for a setting that is none of a few texts."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{field} must be {' or '.join(choices)}, not {shown(value)}")


def shown(value: object) -> str:
    """A value in an error."""
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"
