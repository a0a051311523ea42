"""When requests arrive: the processes of the papers, and a window of a recorded trace. Free of torch.

`coserve.bench.workloads` has the Poisson process and reads and scales whole traces.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from coserve.bench.workloads import ScaledTrace, TraceRow, fit_trace
from coserve.errors import ConfigError

_RISES = 1 / 3  # of FlexLLM's six minutes, the peak came after "around two"
_PEAK = 1 / 6  # of a window, that its peak is judged over
_STRIDE = 10.0  # recorded seconds between the windows that are tried


def gamma_times(rate: float, seconds: float, variation: float, seed: int = 0) -> list[float]:
    """Instants in [0, seconds) of bursts: gaps have a Gamma distribution with a coefficient of variation
    (standard deviation over mean) of `variation`, whose shape is 1 / variation².

    As with `poisson_times` (which is this at a variation of 1) their number is the expected one: the process
    is conditioned on the next arrival coming when the load ends, so the load offered is exact.
    """
    _check(rate=rate, seconds=seconds)
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

    On average 2 / spread a second; here, unlike elsewhere, the number is left to chance as theirs was.
    """
    _check(spread=spread, seconds=seconds)
    draw = random.Random(seed)
    times: list[float] = []
    at = draw.uniform(0.0, spread)
    while at < seconds:
        times.append(at)
        at += draw.uniform(0.0, spread)
    return times


def steady_times(gap: float, seconds: float) -> list[float]:
    """The multi-LoRA report's arrivals (5.2.1): one every `gap` seconds from 0 on, before `seconds`."""
    _check(gap=gap, seconds=seconds)
    # Products instead of sums do not drift; an instant that is `seconds` but for rounding is not before it.
    count = max(1, int(seconds / gap - 1e-9) + 1)
    return [number * gap for number in range(count)]


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a trace replayed as a whole: which part, how much of it was kept, and how it was scaled."""

    scaled: ScaledTrace
    begin: float  # recorded seconds
    recorded: float  # seconds from there on
    kept: int  # requests
    found: int

    def arrivals(self) -> str:
        """Whose arrivals these are, for the reader of a report."""
        return (
            f"seconds {self.begin:.0f} to {self.begin + self.recorded:.0f} of the trace, "
            f"{self.kept} of its {self.found} requests drawn at random, time x {self.scaled.time_scale:.3g}"
        )

    def lengths(self) -> str:
        """What became of the lengths."""
        return f"prompts x {self.scaled.prompt_scale:.3g}, answers x {self.scaled.answer_scale:.3g}"


def rising_and_falling(trace: Sequence[TraceRow], length: float = 360.0) -> float:
    """Where a window of `length` recorded seconds begins that looks like FlexLLM's (8.4): its arrivals rise
    to a peak after a third of it and fall again.

    Of all windows that fit, the one whose peak stands out most over its two ends.
    """
    _check(length=length)
    times = [row.at for row in trace]
    latest = times[-1] - length if times else -1.0
    if latest < 0:
        raise ConfigError(f"the trace is shorter than {length:g} s")
    begins = [number * _STRIDE for number in range(int(latest / _STRIDE) + 1)]
    return max(begins, key=lambda begin: _stands_out(times, begin, length))


def segment(
    trace: Sequence[TraceRow],
    rate: float,
    seconds: float,
    *,
    begin: float,
    length: float,
    longest_prompt: int,
    longest_answer: int,
    seed: int = 0,
) -> Segment:
    """`length` recorded seconds of a trace from `begin` on, replayed in `seconds` at `rate` a second.

    Time is pressed together and requests are left out at random, all with the same chance, so that arrivals
    rise and fall as they did. Lengths are scaled as `scale_trace` does. ConfigError if there are too few.
    """
    _check(rate=rate, seconds=seconds, length=length, longest_prompt=longest_prompt, answer=longest_answer)
    found = [row for row in trace if begin <= row.at < begin + length]
    wanted = max(1, round(rate * seconds))
    if wanted > len(found):
        raise ConfigError(
            f"{wanted} requests are wanted, but seconds {begin:g} to {begin + length:g} of the trace have "
            f"{len(found)}: choose a longer part or a lower rate"
        )
    drawn = sorted(random.Random(seed).sample(range(len(found)), wanted))
    kept = [TraceRow(found[i].at - begin, found[i].prompt, found[i].answer) for i in drawn]
    scaled = fit_trace(kept, seconds / length, longest_prompt, longest_answer)
    return Segment(scaled, begin, length, wanted, len(found))


def _stands_out(times: Sequence[float], begin: float, length: float) -> float:
    """Arrivals a second around the peak's place, less those at the busier end of the window."""
    width = _PEAK * length
    peak = begin + _RISES * length - width / 2
    ends = _count(times, begin, width), _count(times, begin + length - width, width)
    return (_count(times, peak, width) - max(ends)) / width


def _count(times: Sequence[float], begin: float, width: float) -> int:
    return bisect_left(times, begin + width) - bisect_left(times, begin)


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"arrivals need a positive {name.replace('_', ' ')}, not {number}")
