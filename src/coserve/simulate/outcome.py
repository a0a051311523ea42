"""Figures of a simulated run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from coserve.simulate.fleet import FleetResult
from coserve.simulate.intervals import percentile


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run: counts, the share of requests within all their bounds, and seconds (None where nothing was
    answered). Time per token is the mean over an answer's tokens after the first; rates are tokens a
    second."""

    requests: int
    unanswered: int
    refused: int
    within: float
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    time_per_token_mean: float | None
    time_per_token_p99: float | None
    gap_p99: float | None
    output: float
    training: float
    steps: int
    events: int

    def as_dict(self) -> dict[str, float | int | None]:
        """The figures by name."""
        return asdict(self)


def figures_of(found: FleetResult) -> RunFigures:
    """Figures of what a fleet did. Requests that were refused count as asked, and keep no bound."""
    done = [answer for answer in found.answers if answer.is_done]
    asked = len(found.answers)
    first = [answer.first_token for answer in done]
    each = [seconds for answer in done if (seconds := answer.token_seconds) is not None]
    return RunFigures(
        requests=asked,
        unanswered=asked - len(done),
        refused=len(found.refused),
        within=sum(answer.is_within for answer in found.answers) / asked if asked else 1.0,
        ttft_mean=_mean(first),
        ttft_p50=_of(first, 0.5),
        ttft_p99=_of(first, 0.99),
        time_per_token_mean=_mean(each),
        time_per_token_p99=_of(each, 0.99),
        gap_p99=_of([answer.longest for answer in done if answer.tokens > 1], 0.99),
        output=found.tokens / found.seconds,
        training=found.trained / found.seconds,
        steps=found.steps,
        events=found.events,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _of(values: Sequence[float], share: float) -> float | None:
    return percentile(values, share) if values else None
