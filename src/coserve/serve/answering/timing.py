"""Records the times of one answer in the metrics."""

from dataclasses import dataclass
from time import monotonic

from coserve.core.request import SLO, FinishReason
from coserve.metrics import Metrics


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


@dataclass(slots=True, eq=False)
class CallClock:
    """The longest times of a call's answers, in seconds: in the queue, to a first token, between two tokens,
    and in all. `place` is the number of the tenant's own
    sequences that waited when the call came."""

    place: int = 0
    queued: float = 0.0
    first: float = 0.0
    slowest: float = 0.0
    whole: float = 0.0

    def kept(self, stated: SLO) -> bool:
        """Tells whether the bounds were kept, as far as a server sees them: deferral is the engine's."""
        pairs = (
            (stated.first_token, self.first),
            (stated.between_tokens, self.slowest),
            (stated.end_to_end, self.whole),
        )
        return all(bound is None or taken <= bound for bound, taken in pairs)

    def kept_by_first(self, stated: SLO) -> bool | None:
        """The same when the first token is there; None where it cannot be known yet."""
        if self.first > (stated.first_token or self.first):
            return False
        known = stated.between_tokens is None and stated.end_to_end is None
        return self.kept(stated) if known else None


class AnswerTiming:
    """Times of one answer since its arrival, by `time.monotonic`."""

    def __init__(
        self, metrics: Metrics, model: str, arrived: float, clock: CallClock, meter: AnswerMeter
    ) -> None:
        """`clock` is the call's, which notes the longest times of its answers, `meter` that of its tenant and
        model."""
        self._metrics, self._model, self._arrived = metrics, model, arrived
        self._first = self._last = 0.0
        self._clock, self._meter = clock, meter
        self._tokens = 0
        self._between = metrics.inter_token_latency.labels(model)

    def admitted(self, now: float) -> None:
        """Notes that the answer has left the queue."""
        self._clock.queued = max(self._clock.queued, now - self._arrived)
        self._metrics.request_queue_time.labels(self._model).observe(now - self._arrived)

    def token(self, now: float) -> None:
        """Notes a token."""
        self._tokens += 1
        if self._tokens == 1:
            self._first = now
            self._clock.first = max(self._clock.first, now - self._arrived)
            self._metrics.time_to_first_token.labels(self._model).observe(now - self._arrived)
            self._meter.first(now - self._arrived)
        else:
            self._clock.slowest = max(self._clock.slowest, now - self._last)
            self._between.observe(now - self._last)
            self._meter.next(now - self._last)
        self._last = now

    def finished(self, reason: FinishReason) -> None:
        """Notes that the answer is complete."""
        whole = monotonic() - self._arrived
        self._clock.whole = max(self._clock.whole, whole)
        self._metrics.request_success.labels(self._model, reason.value).inc()
        self._metrics.e2e_request_latency.labels(self._model).observe(whole)
        if self._tokens > 1:
            mean = (self._last - self._first) / (self._tokens - 1)
            self._metrics.time_per_output_token.labels(self._model).observe(mean)

    def close(self, prompt_tokens: int) -> None:
        """Notes the end of the answer, complete or not."""
        self._meter.users -= 1
        if self._tokens:
            self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)
            self._metrics.generation_tokens.labels(self._model).inc(self._tokens)
            self._metrics.request_prompt_tokens.labels(self._model).observe(prompt_tokens)
            self._metrics.request_generation_tokens.labels(self._model).observe(self._tokens)
