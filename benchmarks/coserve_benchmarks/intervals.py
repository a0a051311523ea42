"""Intervals of what so many requests or rounds show."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from scipy.stats import binomtest, bootstrap

from coserve.simulate.intervals import CONFIDENCE

_RESAMPLES: Final = 2000
_SEED: Final = 0


def interval(
    statistic: Callable[..., Any], *samples: Sequence[float], paired: bool = False
) -> tuple[float, float]:
    """The 95 % bootstrap interval (percentiles, seeded) of a statistic of one sample or of several.

    `paired` samples are drawn together. The statistic takes arrays and the `axis` to reduce. Of a single
    observation nothing can be told: both ends are its value.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if any(len(array) < 2 for array in arrays):
        alone = float(statistic(*arrays, axis=-1))
        return alone, alone
    found = bootstrap(
        arrays,
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        paired=paired,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def ratio_of_means(ours: Any, theirs: Any, axis: int = -1) -> Any:
    """Mean of one sample over that of another: a statistic for `interval`."""
    return np.mean(ours, axis=axis) / np.mean(theirs, axis=axis)


def share_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval (Clopper and Pearson's) of the share of `count` requests that something holds for.
    Where it holds for all, a bootstrap would never draw one that it does not hold for."""
    if not count:
        return share, share
    found = binomtest(round(share * count), count).proportion_ci(CONFIDENCE)
    return float(found.low), float(found.high)
