"""Percentiles, and intervals of what so many requests, rounds or seeds show."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final

_CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 2000
_SEED: Final = 0


def interval(
    statistic: Callable[..., Any], *samples: Sequence[float], paired: bool = False
) -> tuple[float, float]:
    """The 95 % bootstrap interval (percentiles, seeded) of a statistic of one sample or of several.

    `paired` samples are drawn together. The statistic takes arrays and the `axis` to reduce. Of a single
    observation nothing can be told: both ends are its value.
    """
    import numpy as np  # here: the room is light

    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if any(len(array) < 2 for array in arrays):
        alone = float(statistic(*arrays, axis=-1))
        return alone, alone
    from scipy.stats import bootstrap

    found = bootstrap(
        arrays,
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        paired=paired,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def ratio_of_means(ours: Any, theirs: Any, axis: int = -1) -> Any:
    """Mean of one sample over that of another: a statistic for `interval`."""
    import numpy as np  # here: the room is light

    return np.mean(ours, axis=axis) / np.mean(theirs, axis=axis)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval (Clopper and Pearson's) of the share of `count` requests that something holds for.
    Where it holds for all, a bootstrap would never draw one that it does not hold for."""
    if not count:
        return share, share
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(_CONFIDENCE)
    return float(found.low), float(found.high)


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
    reach = float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)) * error
    return mean - reach, mean + reach
