"""Figures of the demo: measured while it runs, reported as tables, a picture and JSON at the end."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, Final

from coserve.schedule.stats import Stats
from coserve.simulate.replay import AnswerTimes, LoadResult

WINDOW: Final = 3.0  # seconds that the rates on screen look back
_BUSY: Final = 0.25  # load average for each processor from which on other work counts
BINS: Final = 60  # of the time axis: with names and scales they fit into 80 columns


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
        self._recent: deque[tuple[float, Stats]] = deque([(now, replace(stats))])

    def now(self, stats: Stats, now: float) -> TokenRates:
        """Rates over the last few seconds."""
        self._recent.append((now, replace(stats)))
        while len(self._recent) > 2 and self._recent[1][0] <= now - WINDOW:
            self._recent.popleft()
        at, before = self._recent[0]
        return rates(before, stats, now - at)


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The training loss of an optimizer step, `at` seconds after the load began."""

    at: float
    adapter: str
    loss: float


@dataclass(frozen=True, slots=True)
class Way:
    """Figures of one way of doing the load. Times in seconds; None where nothing was measured."""

    name: str
    seconds: float  # of arrivals; answers may end later
    answers: int  # complete ones
    unanswered: int  # requests that were given up
    training_tokens_per_second: float
    first_token: tuple[float, float] | None  # 50th and 99th percentile
    between_tokens: tuple[float, float] | None
    slowdown: float | None  # median over answers of `slowdown_of`
    kept: float | None  # share of them that are within the bound
    steps: int  # optimizer steps, over all adapters
    waits: list[float | None]  # for each of `BINS` parts of the time, the longest wait for a token
    losses: list[float | None]  # and the mean over adapters of the newest loss; None until each has one


def way(
    name: str,
    load: LoadResult,
    losses: Sequence[StepLoss],
    alone: LoadResult | None,
    bound: float,
    requests: int,
) -> Way:
    """Figures of a load of so many requests; a step that lasts beyond its end leaves the newest unasked.
    `alone` is the same load without training, if it is another one."""
    answered = [answer for answer in load.answers if answer.tokens]
    twins = [] if alone is None else zip(load.answers, alone.answers, strict=False)
    slowdowns = [slowdown_of(one, twin) for one, twin in twins if one.tokens and twin.tokens]
    inside = [step for step in losses if step.at <= load.seconds]
    return Way(
        name=name,
        seconds=load.seconds,
        answers=len(answered),
        unanswered=requests - len(answered),
        training_tokens_per_second=load.training_rate(),
        first_token=_percentiles([answer.first_token for answer in answered]),
        between_tokens=_percentiles(load.gaps),
        slowdown=median(slowdowns) if slowdowns else None,
        kept=fmean(ratio <= bound for ratio in slowdowns) if slowdowns else None,
        steps=len(inside),
        waits=_waits(load),
        losses=_losses(inside, load.seconds),
    )


def slowdown_of(answer: AnswerTimes, alone: AnswerTimes) -> float:
    """The time of an answer over that of the same request without training, each by its number of tokens: an
    adapter in training answers at another length than the base."""
    return answer.latency / len(answer.tokens) / (alone.latency / len(alone.tokens))


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    ranked = sorted(values)
    return ranked[math.ceil(0.5 * len(ranked)) - 1], ranked[math.ceil(0.99 * len(ranked)) - 1]


def _waits(load: LoadResult) -> list[float | None]:
    found: list[float | None] = [None] * BINS
    for answer in load.answers:
        before = answer.arrival
        for at in answer.tokens:
            place = int((at - load.started) / load.seconds * BINS)
            if place < BINS:
                found[place] = max(found[place] or 0.0, at - before)
            before = at
    return found


def _losses(steps: Sequence[StepLoss], seconds: float) -> list[float | None]:
    adapters, newest = {step.adapter for step in steps}, dict[str, float]()
    found: list[float | None] = []
    coming = deque(steps)
    for place in range(1, BINS + 1):
        while coming and coming[0].at <= place * seconds / BINS:
            step = coming.popleft()
            newest[step.adapter] = step.loss
        found.append(fmean(newest.values()) if newest and len(newest) == len(adapters) else None)
    return found


@dataclass(slots=True)
class AdapterFigures:
    """One adapter's training and marks."""

    adapter: str
    about: str
    steps: int = 0
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

    date: str = ""
    code: dict[str, Any] | None = None  # the commit that was measured (`core.checkout.measured_code`)
    processor: str = ""
    processors: int = 0  # that this process may use
    threads: int = 0
    busy: float | None = None  # load average of the machine before the demo began; None where it has none
    device: str = ""
    torch_version: str = ""
    model: str = ""
    dtype: str = ""
    data: str | None = None  # file's name
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    capacity: float = 0.0  # requests a second, asked at once and without training
    share: float = 0.0  # of the capacity, at which requests arrive
    requests: int = 0
    slowdown: float = 0.0  # bound that each request states
    trace: dict[str, Any] | None = None
    ways: list[Way] = field(default_factory=list)
    adapters: list[AdapterFigures] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Tells whether other processes were computing when the demo began."""
        return self.busy is not None and self.busy > _BUSY * self.processors

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)
