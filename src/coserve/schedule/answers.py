"""What a sampled token means for its sequence."""

from coserve.core.events import TokenEvent
from coserve.core.plan import Sampled, Segment, TokenLogprobs
from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig


def record(sequence: Sequence, segment: Segment, sampled: Sampled | None, now: float) -> TokenEvent | None:
    """Advances a sequence by a segment that ran, and its answer by the token it led to.

    The event has no finish reason yet, and is None where there is nothing to tell.
    """
    ends = segment.start + segment.length == sequence.length
    sequence.computed += segment.length
    if sampled is None:
        assert not ends, f"sequence {sequence.key} ran to its end and no token was sampled"
        return None
    assert ends == (sampled.token is not None), "a token follows the last one known, and only that"
    scored = _fresh(sequence, segment, sampled)
    if sampled.token is not None:
        _append(sequence, sampled.token, now)
    elif not scored:
        return None
    return TokenEvent(sequence.key, sequence.request.id, sampled.token, sampled.logprobs, scored)


def stop_reason(sequence: Sequence, config: SchedulerConfig) -> FinishReason | None:
    """Why the token just appended ends the answer, if it does."""
    sampling, token = sequence.request.sampling, sequence.output[-1]
    if len(sequence.output) > sampling.min_tokens:
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if token in config.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.output) >= sampling.max_tokens else None


def _fresh(sequence: Sequence, segment: Segment, sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    """The prompt positions scored that were not reported before a preemption."""
    end = min(segment.start + segment.length, len(sequence.request.prompt) - 1)
    fresh = end - max(segment.start, sequence.reported)
    if sequence.request.sampling.prompt_logprobs is None or fresh <= 0:
        return ()
    sequence.reported = end
    return sampled.prompt_logprobs[-fresh:]


def _append(sequence: Sequence, token: int, now: float) -> None:
    sequence.output.append(token)
    if sequence.last_token_at is None:
        sequence.first_token_at = now
    else:
        sequence.slowest = max(sequence.slowest, now - sequence.last_token_at)
    sequence.last_token_at = now
