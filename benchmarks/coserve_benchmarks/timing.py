"""Alternating measurement: A, B, A, B, ... so that drift of the machine affects all contestants alike; and
intervals of what so many rounds or requests show."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch

_CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 2000
_SEED: Final = 0
# What the two ends of a spread are, for the JSON.
OF_ROUNDS: Final = "95 % bootstrap interval of the median over paired rounds"
OF_REQUESTS: Final = "95 % bootstrap interval over requests"
OF_SHARE: Final = "95 % binomial interval (Clopper-Pearson) over requests"
OF_SECONDS: Final = "95 % bootstrap interval over the seconds of the load"


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


def share_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval (Clopper and Pearson's) of the share of `count` requests that something holds for.
    Where it holds for all, a bootstrap would never draw one that it does not hold for."""
    if not count:
        return share, share
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(_CONFIDENCE)
    return float(found.low), float(found.high)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of every counted round of one contestant, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def low(self) -> float:
        """Lower end of the median's interval."""
        return interval(np.median, self.seconds)[0]

    @property
    def high(self) -> float:
        """Upper end of the median's interval."""
        return interval(np.median, self.seconds)[1]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two contestants' speeds: the median of the ratios of neighbouring rounds, and its interval."""

    value: float
    low: float
    high: float


def speedup(ours: Timing, peer: Timing) -> Ratio:
    """The peer's seconds over ours for the same work; above one, ours is faster."""
    rounds = [theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    return ratio_of(rounds)


def ratio_of(rounds: Sequence[float]) -> Ratio:
    """The median of ratios that were found in so many rounds, and its interval."""
    return Ratio(median(rounds), *interval(np.median, rounds))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """`work` as a contestant: the seconds that a call took."""

    def run() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return run


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int, threads: int, warmup: int = 1
) -> dict[str, Timing]:
    """Runs all contestants in turn, `warmup` rounds uncounted and then `rounds` counted ones.

    Each returns the seconds it took, so that it may leave out what is not part of its work. All run in
    this process, one at a time and with all `threads`: two at once would only wait for one another.
    """
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, run in contestants.items():
            gc.collect()
            torch.set_num_threads(threads)
            seconds = run()
            if turn >= warmup:
                taken[name].append(seconds)
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of all values do not exceed, between neighbours linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
