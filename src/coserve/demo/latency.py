"""Latencies of callers: to the first token, and between two tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coserve.core.request import SLO


def percentile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile of `values` (nearest rank); None if there are none."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@dataclass(frozen=True, slots=True)
class Waits:
    """Figures of one kind of wait in an act, seconds; None where there was no wait, or no bound."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    bound: float | None = None
    within: float | None = None  # share of the waits that are at most the bound


def figures_of(waits: Sequence[float], bound: float | None) -> Waits:
    """Percentiles of `waits`, and the share of them within `bound`."""
    within = None if bound is None or not waits else sum(wait <= bound for wait in waits) / len(waits)
    p50, p90, p95, p99 = (percentile(waits, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Waits(p50, p90, p95, p99, bound, within)


@dataclass(slots=True)
class _AnswerTimes:
    """One answer under way: its arrival, its first and newest token's times, and its longest gap."""

    asked: float
    first: float | None = None
    last: float | None = None
    slowest: float = 0.0

    def keeps(self, slo: SLO, now: float) -> bool:
        """Tells whether every wait so far is within its bound, the one that still lasts at `now` included."""
        first = (now if self.first is None else self.first) - self.asked
        return (slo.first_token is None or first <= slo.first_token) and (
            slo.between_tokens is None or self.slowest <= slo.between_tokens
        )


@dataclass(slots=True)
class Latencies:
    """Collects the waits of many answers; all times in seconds on one clock.

    With bounds (`slo`: on the first token, and between tokens), an answer keeps them if all its waits do.
    """

    slo: SLO = field(default_factory=SLO)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0  # that came to their end
    kept: int = 0  # of those, the ones whose waits are all within the bounds
    _waiting: dict[int, _AnswerTimes] = field(default_factory=dict)

    def asked(self, key: int, at: float) -> None:
        """A request arrived."""
        self._waiting[key] = _AnswerTimes(at)

    def token(self, key: int, at: float) -> None:
        """The request's next token reached the caller."""
        answer = self._waiting[key]
        self.tokens += 1
        if answer.last is None:
            answer.first = at
            self.firsts.append(at - answer.asked)
        else:
            gap = at - answer.last
            self.gaps.append(gap)
            answer.slowest = max(answer.slowest, gap)
        answer.last = at

    def ended(self, key: int, at: float) -> None:
        """The request's answer is complete."""
        answer = self._waiting.pop(key)
        self.answers += 1
        self.kept += answer.keeps(self.slo, at)

    @property
    def unanswered(self) -> int:
        """Requests whose answers are not complete."""
        return len(self._waiting)

    def late(self, now: float) -> int:
        """Unanswered requests that have broken a bound by `now`, be it by a token that is still to come."""
        between = self.slo.between_tokens
        return sum(
            not answer.keeps(self.slo, now)
            or (between is not None and answer.last is not None and now - answer.last > between)
            for answer in self._waiting.values()
        )

    def gap(self, share: float, newest: int) -> float | None:
        """A percentile of the `newest` times between tokens."""
        return percentile(self.gaps[-newest:], share)
