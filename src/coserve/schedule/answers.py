"""Appends sampled tokens to their sequences."""

from coserve.core.events import TokenEvent
from coserve.core.plan import InferenceSegment, Sampled, TokenLogprobs
from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig


def record(
    sequence: Sequence, segment: InferenceSegment, sampled: Sampled | None, now: float
) -> TokenEvent | None:
    """Records a segment that ran and the token sampled from it.

    Returns the event, without a finish reason; None where there is no token or score to report.
    """
    ends = segment.start + segment.length == sequence.known
    sequence.under_way -= 1
    if sampled is None:
        assert not ends, f"sequence {sequence.key} ran to its end and no token was sampled"
        return None
    assert ends == (sampled.token is not None), "a token follows the last one known, and only that"
    scored = _fresh(sequence, segment, sampled)
    if sequence.request.sampling.max_tokens == 0:  # the prompt was to be read, without an answer
        if not (scored or ends or sampled.pooled):
            return None
        pooled, restarts = sampled.pooled, segment.start == 0
        return TokenEvent(
            sequence.key, sequence.request.id, None, None, scored, pooled=pooled, restarts=restarts
        )
    if sampled.token is not None:
        _append(sequence, sampled.token, now)
    elif not scored:
        return None
    cached = sequence.cached or 0 if len(sequence.output) == 1 else 0
    return TokenEvent(
        sequence.key, sequence.request.id, sampled.token, sampled.logprobs, scored, cached=cached
    )


def stop_reason(sequence: Sequence, config: SchedulerConfig, read: int = 0) -> FinishReason | None:
    """Finish reason of a complete answer, else None; `read` of its tokens have passed the model."""
    sampling = sequence.request.sampling
    if len(sequence.output) > sampling.min_tokens:
        token = sequence.output[-1]
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in config.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
    if sampling.max_tokens == 0:
        return FinishReason.LENGTH if read == sequence.known else None
    return FinishReason.LENGTH if len(sequence.output) >= sampling.max_tokens else None


def _fresh(sequence: Sequence, segment: InferenceSegment, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    """Scores of the segment's prompt positions, without those reported before a preemption."""
    if sequence.request.sampling.prompt_logprobs is None:
        return ()
    end = min(segment.start + segment.length, len(sequence.request.prompt) - 1)
    fresh = end - max(segment.start, sequence.reported)
    if fresh <= 0:
        return ()
    sequence.reported = end
    return sampled.prompt_logprobs[-fresh:]


def _append(sequence: Sequence, token: int, now: float) -> None:
    sequence.output.append(token)
    sequence.unsampled -= 1
    if sequence.last_token_at is None:
        sequence.first_token_at, sequence.deferred_first = now, sequence.deferred
    else:
        sequence.slowest = max(sequence.slowest, now - sequence.last_token_at)
    sequence.last_token_at = now
