"""Percentiles, and intervals of what so many seeds show."""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

CONFIDENCE: Final = 0.95


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of all values do not exceed, between neighbours linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of a few values, by Student's t. Of a single value nothing can be
    told."""
    if len(values) < 2:
        return None
    from scipy.stats import sem, t

    mean, error = fmean(values), float(sem(values))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean - reach, mean + reach
