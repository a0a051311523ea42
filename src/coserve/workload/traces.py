"""Recorded traces: scaling to a machine and a model, and replay of parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.errors import ConfigError
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


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
