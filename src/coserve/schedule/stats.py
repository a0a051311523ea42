"""Counters of the scheduler."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence

RECENT: Final = 256  # recent answers in `slowdown`


@dataclass(slots=True)
class Stats:
    """Totals since the start. A training row that passed half of the layers counts as half a row."""

    steps: int = 0
    fused_steps: int = 0  # inference and training in one step
    fused_possible: int = 0  # inference in the step, and training was there to join it
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafts: int = 0  # segments that verified draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that became the answer's
    kept_rows: float = 0.0  # forward; the tail counts neither here nor in `backward_rows`
    backward_rows: float = 0.0
    updates: int = 0
    preemptions: int = 0
    swapped_out_pages: int = 0  # of preempted sequences and of prefixes, to the second tier
    swapped_in_pages: int = 0
    swap_failures: int = 0  # copies that could not be written or read
    offloaded_read_bytes: int = 0  # of keys and values, by steps with rows of offloaded sequences
    offload_failures: int = 0  # sequences that were lost with them
    recomputed_tokens: int = 0  # that passed the model again after a preemption
    asked_tokens: int = 0  # of prompts that began to run, and how many of these were found in the cache
    found_tokens: int = 0
    finished: int = 0  # sequences that ended, cancelled ones included
    slo_met: int = 0  # finished sequences that stated a bound and had all of theirs kept
    slo_missed: int = 0
    answer_seconds: float = 0.0  # of finished answers, from arrival to the last token
    answer_deferred_seconds: float = 0.0  # of these, those that training took
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def slowdown(self) -> float:
        """Time of recent answers over what it would have been without training; 1 without any."""
        seconds, deferred = map(sum, zip(*self.recent, strict=True)) if self.recent else (0.0, 0.0)
        return seconds / (seconds - deferred) if seconds > deferred else 1.0

    def count_entered(self, sequence: Sequence) -> None:
        """Counts a sequence that begins to run; a preempted one only the first time."""
        if not sequence.preemptions:
            self.asked_tokens += len(sequence.request.prompt)
            self.found_tokens += sequence.cached or 0

    def count_finished(self, sequence: Sequence, now: float) -> None:
        """Counts an answer that ended at `now`, unless it was cancelled."""
        self.finished += 1
        if sequence.finish_reason is FinishReason.CANCELLED:
            return
        slo, arrival = sequence.request.slo, sequence.request.arrival
        self.answer_seconds += now - arrival
        self.answer_deferred_seconds += sequence.deferred
        if sequence.taken_over_at is None:
            self.recent.append((now - arrival, sequence.deferred))
        else:  # without the time in another engine, of which training took nothing
            own = sequence.deferred - sequence.deferred_first
            self.recent.append((now - sequence.taken_over_at, own))
        if not slo.states_bound:
            return
        first = now if sequence.first_token_at is None else sequence.first_token_at
        stated = (slo.first_token, slo.between_tokens, slo.end_to_end, slo.deferral, slo.slowdown)
        took = (first - arrival, sequence.slowest, now - arrival, sequence.deferred, slowdown_taken(sequence))
        kept = all(bound is None or value <= bound for bound, value in zip(stated, took, strict=True))
        self.slo_met += kept
        self.slo_missed += not kept


def slowdown_taken(sequence: Sequence) -> float:
    """The larger slowdown by training, of a sequence's time to the first token and of that since then."""
    if sequence.since_first is None or sequence.first_token_at is None or sequence.last_token_at is None:
        return 1.0
    spans = [(sequence.last_token_at - sequence.since_first, sequence.deferred - sequence.deferred_first)]
    if sequence.taken_over_at is None:
        spans.append((sequence.first_token_at - sequence.request.arrival, sequence.deferred_first))
    return max((span / max(span - taken, 1e-9) for span, taken in spans if taken > 0.0), default=1.0)
