"""Latencies of callers: to the first token, and between two tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def percentile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile of `values` (nearest rank); None if there are none."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@dataclass(slots=True)
class _Waiting:
    """One answer under way: its arrival, its newest token's time, and its longest gap."""

    asked: float
    last: float | None = None
    slowest: float = 0.0


@dataclass(slots=True)
class Latencies:
    """Collects the waits of many answers; all times in seconds on one clock.

    With a bound on the time between tokens (`slo`), an answer keeps it if every gap in it does.
    """

    slo: float | None = None
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0  # that came to their end
    kept: int = 0  # of those, the ones whose slowest gap is within the bound
    _waiting: dict[int, _Waiting] = field(default_factory=dict)

    def asked(self, key: int, at: float) -> None:
        """A request arrived."""
        self._waiting[key] = _Waiting(at)

    def token(self, key: int, at: float) -> None:
        """The request's next token reached the caller."""
        answer = self._waiting[key]
        self.tokens += 1
        if answer.last is None:
            self.firsts.append(at - answer.asked)
        else:
            gap = at - answer.last
            self.gaps.append(gap)
            answer.slowest = max(answer.slowest, gap)
        answer.last = at

    def ended(self, key: int) -> None:
        """The request's answer is complete."""
        answer = self._waiting.pop(key)
        self.answers += 1
        self.kept += self.slo is None or answer.slowest <= self.slo

    def gap(self, share: float, newest: int | None = None) -> float | None:
        """A percentile of the times between tokens, of the `newest` ones only where that is given."""
        return percentile(self.gaps if newest is None else self.gaps[-newest:], share)

    def gaps_within(self, bound: float) -> float | None:
        """Share of the times between tokens that `bound` covers."""
        return sum(gap <= bound for gap in self.gaps) / len(self.gaps) if self.gaps else None
