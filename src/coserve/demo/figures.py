"""Figures of the demo: counted while it runs, reported as tables and JSON at the end."""

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from coserve.demo.latency import Latencies, percentile
from coserve.schedule.stats import Stats

WINDOW: Final = 3.0  # seconds that the rates on screen look back


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens a second by kind. A training token counts after its forward and backward passes."""

    decode: float = 0.0
    prefill: float = 0.0
    training: float = 0.0
    fused: float | None = None  # of the steps that could carry both, the share that did


def rates(before: Stats, after: Stats, seconds: float) -> TokenRates:
    """Rates between two readings of the scheduler's counters, `seconds` apart."""
    if seconds <= 0:
        return TokenRates()
    rows = after.kept_rows + after.backward_rows - before.kept_rows - before.backward_rows
    possible = after.fused_possible - before.fused_possible
    return TokenRates(
        decode=(after.decode_tokens - before.decode_tokens) / seconds,
        prefill=(after.prefill_tokens - before.prefill_tokens) / seconds,
        training=rows / 2 / seconds,
        fused=(after.fused_steps - before.fused_steps) / possible if possible else None,
    )


class RateMeter:
    """Readings of the scheduler's counters over time."""

    def __init__(self, stats: Stats, now: float) -> None:
        self.started = now
        self._first = replace(stats)
        self._recent: deque[tuple[float, Stats]] = deque([(now, self._first)])

    def now(self, stats: Stats, now: float) -> TokenRates:
        """Rates over the last few seconds."""
        self._recent.append((now, replace(stats)))
        while len(self._recent) > 2 and self._recent[1][0] <= now - WINDOW:
            self._recent.popleft()
        at, before = self._recent[0]
        return rates(before, stats, now - at)

    def total(self, stats: Stats, now: float) -> TokenRates:
        """Rates since the meter was made."""
        return rates(self._first, stats, now - self.started)


@dataclass(frozen=True, slots=True)
class Phase:
    """One act with requests: its rates and waits. Times in seconds."""

    seconds: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    training_tokens_per_second: float
    fused_share: float | None
    answers: int
    first_token_p50: float | None
    first_token_p99: float | None
    between_tokens_p50: float | None
    between_tokens_p99: float | None
    gaps_within_slo: float | None = None  # None where no bound was stated
    answers_within_slo: float | None = None


def phase(latencies: Latencies, measured: TokenRates, seconds: float) -> Phase:
    """Figures of a finished act."""
    slo = latencies.slo
    return Phase(
        seconds=seconds,
        output_tokens_per_second=latencies.tokens / seconds,
        prompt_tokens_per_second=measured.prefill,
        training_tokens_per_second=measured.training,
        fused_share=measured.fused,
        answers=latencies.answers,
        first_token_p50=percentile(latencies.firsts, 0.5),
        first_token_p99=percentile(latencies.firsts, 0.99),
        between_tokens_p50=latencies.gap(0.5),
        between_tokens_p99=latencies.gap(0.99),
        gaps_within_slo=None if slo is None else latencies.gaps_within(slo),
        answers_within_slo=None
        if slo is None or not latencies.answers
        else latencies.kept / latencies.answers,
    )


@dataclass(slots=True)
class AdapterFigures:
    """One adapter's training and marks."""

    adapter: str
    about: str
    steps: int = 0
    planned: int = 0
    loss_first: float | None = None  # of the first optimizer step
    loss_last: float | None = None  # mean of the last five
    held_out: int = 0  # questions
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    exact_before: float | None = None  # None where a question has no single right answer
    exact_after: float | None = None


@dataclass(slots=True)
class DemoReport:
    """All figures measured so far."""

    model: str = ""
    dtype: str = ""
    threads: int = 0
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    slo_between_tokens: float | None = None
    trace: dict[str, Any] | None = None
    alone: Phase | None = None
    training: Phase | None = None
    adapters: list[AdapterFigures] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)
