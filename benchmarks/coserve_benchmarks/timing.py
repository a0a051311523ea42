"""Alternating measurement: A, B, A, B, ... so that drift of the machine affects all contestants alike."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of every counted round of one contestant, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two contestants' speeds: that of the medians, and the least and greatest of two neighbouring
    rounds."""

    value: float
    low: float
    high: float


def speedup(ours: Timing, peer: Timing) -> Ratio:
    """The peer's seconds over ours for the same work; above one, ours is faster."""
    rounds = [theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    return Ratio(peer.median / ours.median, min(rounds), max(rounds))


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
