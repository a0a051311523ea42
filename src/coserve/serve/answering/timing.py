"""Records the times of one answer in the metrics."""

from time import monotonic

from coserve.core.request import FinishReason
from coserve.metrics import Metrics
from coserve.serve.answering.clock import CallClock
from coserve.serve.answering.meter import AnswerMeter


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
