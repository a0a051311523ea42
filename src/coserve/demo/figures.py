"""Figures of the demo: counted while it runs, reported as tables and JSON at the end."""

from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from coserve.core.request import SLO
from coserve.demo.latency import Latencies, Waits, figures_of
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
    rows = (after.kept_rows - before.kept_rows) + (after.backward_rows - before.backward_rows)
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
    prompt_tokens_per_second: float  # computed ones, without those found in the cache
    training_tokens_per_second: float
    fused_share: float | None
    answers: int  # complete ones
    unanswered: int  # requests whose answers were not complete when the measuring ended
    unanswered_late: int  # of these, the ones that had broken a bound
    answers_within: float | None  # share of the complete answers with every wait within its bound
    first_token: Waits
    between_tokens: Waits


def phase(latencies: Latencies, measured: TokenRates, seconds: float, now: float) -> Phase:
    """Figures of an act that was measured for `seconds` until `now`."""
    slo = latencies.slo
    bounded = slo.first_token is not None or slo.between_tokens is not None
    return Phase(
        seconds=seconds,
        output_tokens_per_second=latencies.tokens / seconds if seconds > 0 else 0.0,
        prompt_tokens_per_second=measured.prefill,
        training_tokens_per_second=measured.training,
        fused_share=measured.fused,
        answers=latencies.answers,
        unanswered=latencies.unanswered,
        unanswered_late=latencies.late(now),
        answers_within=latencies.kept / latencies.answers if bounded and latencies.answers else None,
        first_token=figures_of(latencies.firsts, slo.first_token),
        between_tokens=figures_of(latencies.gaps, slo.between_tokens),
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that each request states, seconds: to its first token, and between two tokens."""

    first_token: float
    between_tokens: float

    @property
    def slo(self) -> SLO:
        """The bounds as a request states them."""
        return SLO(first_token=self.first_token, between_tokens=self.between_tokens)


@dataclass(slots=True)
class DemoReport:
    """All figures measured so far."""

    date: str = ""
    code: dict[str, Any] | None = None  # the commit that was measured (`core.checkout.measured_code`)
    processor: str = ""
    threads: int = 0
    device: str = ""
    torch_version: str = ""
    model: str = ""
    dtype: str = ""
    planned_seconds: float = 0.0  # of training
    conversations: int = 0
    data: str | None = None  # file's name
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    asked: Bounds | None = None
    bounds: Bounds | None = None  # those of both acts: the ones asked for, or multiples that are kept
    trace: dict[str, Any] | None = None
    alone: Phase | None = None
    training: Phase | None = None
    alone_again: Phase | None = None  # after the training
    adapters: list[AdapterFigures] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)
