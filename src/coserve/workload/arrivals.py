"""Arrival processes of requests: those of the papers, seeded."""

import random
from itertools import accumulate

from coserve.errors import ConfigError


def poisson_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Instants in [0, seconds) of a Poisson process of `rate` arrivals a second, given their number.

    The number is the expected one: a process conditioned on it has independent, uniform instants. So the
    load offered is exactly the one asked for, whatever the seed.
    """
    if not rate > 0 or not seconds > 0:
        raise ConfigError(f"arrivals need a positive rate and duration, not {rate} a second for {seconds} s")
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, seconds) for _ in range(max(1, round(rate * seconds))))


def gamma_times(rate: float, seconds: float, variation: float, seed: int = 0) -> list[float]:
    """Instants in [0, seconds) of bursts: gaps have a Gamma distribution with a coefficient of variation
    (standard deviation over mean) of `variation`, whose shape is 1 / variation².

    As with `poisson_times` (which is this at a variation of 1) their number is the expected one: the process
    is conditioned on the next arrival coming when the load ends, so the load offered is exact.
    """
    check_positive(rate=rate, seconds=seconds)
    if not 1.0 <= variation < float("inf"):
        raise ConfigError(f"bursts have a coefficient of variation of at least 1, not {variation}")
    draw = random.Random(seed)
    shape = variation**-2
    count = max(1, round(rate * seconds))
    # Scale does not matter: all gaps together are made to take `seconds`. The least float is for a
    # variation so large that every gap is drawn as 0.
    ends = list(accumulate(draw.gammavariate(shape, 1.0) for _ in range(count + 1)))
    total = max(ends[-1], 5e-324)
    last = seconds * (1 - 2**-53)
    return [min(last, seconds * (end / total)) for end in ends[:-1]]


def spread_times(spread: float, seconds: float, seed: int = 0) -> list[float]:
    """FineInfer's arrivals (4.1): each comes at a random instant within `spread` seconds of the last one.

    On average 2 / spread a second; here, as in the paper, the number is random.
    """
    check_positive(spread=spread, seconds=seconds)
    draw = random.Random(seed)
    times: list[float] = []
    at = draw.uniform(0.0, spread)
    while at < seconds:
        times.append(at)
        at += draw.uniform(0.0, spread)
    return times


def steady_times(gap: float, seconds: float) -> list[float]:
    """The multi-LoRA report's arrivals (5.2.1): one every `gap` seconds from 0 on, before `seconds`."""
    check_positive(gap=gap, seconds=seconds)
    # Products instead of sums do not drift; an instant that is `seconds` but for rounding is not before it.
    count = max(1, int(seconds / gap - 1e-9) + 1)
    return [number * gap for number in range(count)]


def check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"arrivals need a positive {name.replace('_', ' ')}, not {number}")
