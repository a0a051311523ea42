"""Alternating measurement: A, B, A, B, ... so that drift of the machine affects all contestants alike."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import torch

from coserve_benchmarks.intervals import interval

LEAST_ROUNDS: Final = 5  # for an interval
# What the two ends of a spread are, for the JSON.
OF_ROUNDS: Final = "95 % bootstrap interval of the median over paired rounds"
LEAST_AND_MOST: Final = "least and greatest of the rounds"
OF_REQUESTS: Final = "95 % bootstrap interval over requests"
OF_SHARE: Final = "95 % binomial interval (Clopper-Pearson) over requests"
OF_SEEDS: Final = "95 % bootstrap interval over seeds"
OF_CASES: Final = "95 % binomial interval (Clopper-Pearson) over cases"
OF_SECONDS: Final = "95 % bootstrap interval over the seconds of the load"


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
    spread_is: str = OF_ROUNDS


def speedup(ours: Timing, peer: Timing) -> Ratio:
    """The peer's seconds over ours for the same work; above one, ours is faster."""
    rounds = [theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    return ratio_of(rounds)


def ratio_of(rounds: Sequence[float]) -> Ratio:
    """The median of ratios that were found in so many rounds, and its interval."""
    return Ratio(median(rounds), *interval(np.median, rounds), spread_of(len(rounds)))


def spread_of(rounds: int) -> str:
    """Describes the interval of a median over so many rounds.

    The least and the greatest of n rounds hold the true median with a probability of 1 - 2^(1-n): 0.75 for
    three rounds, 0.94 for five. No bootstrap of them can be surer, so below five it is called what it is.
    """
    return OF_ROUNDS if rounds >= LEAST_ROUNDS else f"least and greatest of the median's {rounds} rounds"


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
