"""Counters of the scheduler."""

from dataclasses import dataclass

from coserve.core.request import FinishReason
from coserve.core.sequence import Sequence


@dataclass(slots=True)
class Stats:
    """Totals since the start. A training row that passed half of the layers counts as half a row."""

    steps: int = 0
    fused_steps: int = 0  # inference and training in one step
    fused_possible: int = 0  # inference in the step, and training was there to join it
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kept_rows: float = 0.0  # the way through the tail counts neither here nor there
    backward_rows: float = 0.0
    updates: int = 0
    preemptions: int = 0
    asked_tokens: int = 0  # of prompts that began to run, and how many of these were found in the cache
    found_tokens: int = 0
    finished: int = 0  # sequences that ended, cancelled ones included
    slo_met: int = 0  # finished sequences that stated a bound and had all of theirs kept
    slo_missed: int = 0

    def count_entered(self, sequence: Sequence) -> None:
        """Counts a sequence that begins to run; a preempted one only the first time."""
        if not sequence.preemptions:
            self.asked_tokens += len(sequence.request.prompt)
            self.found_tokens += sequence.cached or 0

    def count_finished(self, sequence: Sequence, now: float) -> None:
        """Counts an answer that ended at `now`, unless it was cancelled."""
        self.finished += 1
        slo = sequence.request.slo
        stated = (slo.first_token, slo.between_tokens, slo.end_to_end, slo.deferral)
        if sequence.finish_reason is FinishReason.CANCELLED or stated == (None, None, None, None):
            return
        arrival = sequence.request.arrival
        first = now if sequence.first_token_at is None else sequence.first_token_at
        took = (first - arrival, sequence.slowest, now - arrival, sequence.deferred)
        kept = all(bound is None or time <= bound for bound, time in zip(stated, took, strict=True))
        self.slo_met += kept
        self.slo_missed += not kept
