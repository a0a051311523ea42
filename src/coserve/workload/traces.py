"""Recorded traces: scaling to a machine and a model, and replay of parts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from coserve.errors import ConfigError
from coserve.workload.arrivals import check_positive
from coserve.workload.trace_formats import TraceRow


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    """A trace scaled to a machine, and the factor of each dimension."""

    rows: tuple[TraceRow, ...]
    time_scale: float  # scaled seconds for each recorded one
    prompt_scale: float
    answer_scale: float

    def describe(self) -> str:
        """Describes the trace and its scales in one line."""
        return (
            f"{len(self.rows)} requests of the trace, gaps x {self.time_scale:.3g}, "
            f"prompts x {self.prompt_scale:.3g}, answers x {self.answer_scale:.3g}"
        )


@dataclass(frozen=True, slots=True)
class TracePart:
    """A replayed part of a trace: its place, the share of requests kept, and its scaling."""

    scaled: ScaledTrace
    begin: float  # recorded seconds
    recorded: float  # seconds from there on
    kept: int  # requests
    found: int

    def arrivals(self) -> str:
        """Describes the part of the trace that the arrivals come from, and how it was scaled."""
        return (
            f"seconds {self.begin:.0f} to {self.begin + self.recorded:.0f} of the trace, "
            f"{self.kept} of its {self.found} requests drawn at random, time x {self.scaled.time_scale:.3g}"
        )

    def lengths(self) -> str:
        """Describes how lengths were scaled."""
        return f"prompts x {self.scaled.prompt_scale:.3g}, answers x {self.scaled.answer_scale:.3g}"


def scale_trace(
    trace: Sequence[TraceRow], rate: float, seconds: float, longest_prompt: int, longest_answer: int
) -> ScaledTrace:
    """The beginning of a trace at `rate` requests a second on average, for `seconds`.

    All gaps are multiplied by one factor and all lengths by another, which keeps bursts and the shapes of
    distributions; lengths never grow, and are at least one token. The trace's longest ones become
    `longest_prompt` and `longest_answer`.
    """
    if not trace:
        raise ConfigError("there is no trace to scale")
    if not (rate > 0 and seconds > 0 and longest_prompt > 0 and longest_answer > 0):
        raise ConfigError("a trace is scaled to a positive rate, duration and longest prompt and answer")
    wanted = trace[: max(1, round(rate * seconds))]
    span = wanted[-1].at
    # The last of n arrivals comes, on average, n / (n + 1) of the way.
    time_scale = seconds * len(wanted) / (len(wanted) + 1) / span if span > 0 else 1.0
    return fit_trace(wanted, time_scale, longest_prompt, longest_answer)


def fit_trace(
    rows: Sequence[TraceRow], time_scale: float, longest_prompt: int, longest_answer: int
) -> ScaledTrace:
    """Rows with every instant multiplied by `time_scale`, and lengths scaled to the given longest ones;
    lengths never grow, and are at least one token."""
    prompt_scale = min(1.0, longest_prompt / max(1, *(row.prompt for row in rows)))
    answer_scale = min(1.0, longest_answer / max(1, *(row.answer for row in rows)))
    scaled = tuple(
        TraceRow(row.at * time_scale, _scaled(row.prompt, prompt_scale), _scaled(row.answer, answer_scale))
        for row in rows
    )
    return ScaledTrace(scaled, time_scale, prompt_scale, answer_scale)


def trace_part(
    trace: Sequence[TraceRow],
    rate: float,
    seconds: float,
    *,
    begin: float,
    length: float,
    longest_prompt: int,
    longest_answer: int,
    seed: int = 0,
) -> TracePart:
    """`length` recorded seconds of a trace from `begin` on, replayed in `seconds` at `rate` a second.

    Time is compressed and requests are dropped at random with equal chance, which keeps the shape of
    arrivals. Lengths are scaled as by `scale_trace`. Raises ConfigError if there are too few requests.
    """
    check_positive(rate=rate, seconds=seconds, length=length)
    check_positive(longest_prompt=longest_prompt, longest_answer=longest_answer)
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
    return TracePart(scaled, begin, length, wanted, len(found))


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
