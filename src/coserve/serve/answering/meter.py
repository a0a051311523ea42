"""Counts of tokens and their latencies, of a tenant's answers by one model."""

from dataclasses import dataclass


@dataclass(slots=True)
class AnswerMeter:
    """Tokens of one tenant's answers by one model since the last sample. `users` answers are under way."""

    users: int = 0
    tokens: int = 0
    gaps: int = 0
    gap_seconds: float = 0.0
    slowest: float = 0.0
    firsts: int = 0
    first_seconds: float = 0.0

    def first(self, seconds: float) -> None:
        """Notes an answer's first token, and the time that it took."""
        self.tokens += 1
        self.firsts += 1
        self.first_seconds += seconds

    def next(self, seconds: float) -> None:
        """Notes another token, and the time since the one before."""
        self.tokens += 1
        self.gaps += 1
        self.gap_seconds += seconds
        self.slowest = max(self.slowest, seconds)

    def add(self, other: "AnswerMeter") -> None:
        """Adds another's counts to these."""
        self.tokens += other.tokens
        self.gaps += other.gaps
        self.gap_seconds += other.gap_seconds
        self.slowest = max(self.slowest, other.slowest)
        self.firsts += other.firsts
        self.first_seconds += other.first_seconds

    def clear(self) -> None:
        """Begins anew, for the same users."""
        self.tokens = self.gaps = self.firsts = 0
        self.gap_seconds = self.slowest = self.first_seconds = 0.0

    def latencies(self) -> list[float | None]:
        """Means of the time between tokens, the longest, and the mean time to the first token; None for what
        there was none of."""
        return [
            short(self.gap_seconds / self.gaps) if self.gaps else None,
            short(self.slowest) if self.gaps else None,
            short(self.first_seconds / self.firsts) if self.firsts else None,
        ]


def short(number: float) -> float:
    """A number with four digits that count: history is thousands of them."""
    return float(f"{number:.4g}")
