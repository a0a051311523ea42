"""Newcomers: requests of tenants below their fair share, whose first token has priority.

A step with a newcomer's prompt has no training, and only as many of the others' decode rows (longest delayed
first) as keep the step within `SLOWER` times the prompt's own time. A newcomer enters at once and preempts
the latest others. So its first token takes at most `SLOWER` times as long as alone, after the step under way
on arrival.
"""

from collections.abc import Iterable
from typing import Final

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import StepFeatures
from coserve.schedule.step_costs import StepCosts

INFINITE = float("inf")
SLOWER: Final = 2.0
LATELY: Final = 60.0  # seconds in which another newcomer is expected: training runs in short pieces meanwhile


def is_new(sequence: Sequence) -> bool:
    """Tells whether the sequence is a newcomer's and has no first token yet."""
    return sequence.request.newcomer and sequence.newest_at is None


def step_limit(running: Iterable[Sequence], cost: StepCosts, config: SchedulerConfig) -> float:
    """Limit of a step's seconds with others' rows in it; infinite without newcomers."""
    features, left = StepFeatures(), config.prefill_rows(bounded=True)
    for sequence in filter(is_new, running):
        rows = min(sequence.remaining, left)
        left -= rows
        _add(features, sequence, rows, config)
    return SLOWER * cost.predict_features(features) if left < config.prefill_rows(bounded=True) else INFINITE


def decoding(running: Iterable[Sequence], cost: StepCosts, config: SchedulerConfig) -> list[Sequence]:
    """Running sequences to decode in this step: newcomers, then the others in order of arrival, those in the
    background last.

    Pages are taken from the last in this order, never from a sequence whose row is in the step.
    """
    running = list(running)
    ready = _ready(running, config)
    if not any([one.request.newcomer or one.request.background for one in running]):
        return ready
    ready.sort(key=lambda one: (one.request.background, not one.request.newcomer))
    limit = step_limit(running, cost, config)
    if limit == INFINITE:
        return ready
    features, chosen = StepFeatures(), set[int]()
    for sequence in filter(is_new, running):
        _add(features, sequence, min(sequence.remaining, config.prefill_rows(bounded=True)), config)
    for sequence in sorted(ready, key=_held_longest):
        if not is_new(sequence):
            _add(features, sequence, 1, config)
        if not sequence.request.newcomer and cost.predict_features(features) > limit:
            break
        chosen.add(sequence.key)
    return [sequence for sequence in ready if sequence.key in chosen]


def _ready(running: list[Sequence], config: SchedulerConfig) -> list[Sequence]:
    """Sequences with one row left and no token in plans beside the next. Each plan takes an equal share of
    the sequences, those without a token for longest first."""
    left, overlap = [one.remaining for one in running], config.overlap
    ready = [
        one
        for one, rows in zip(running, left, strict=True)
        if rows == 1 and not (one.unsampled and overlap.beside(one.unsampled))
    ]
    most = overlap.share(sum([rows <= 1 for rows in left]))
    if len(ready) <= most:
        return ready
    keys = {one.key for one in sorted(ready, key=_held_longest)[:most]}
    return [one for one in ready if one.key in keys]


def _add(features: StepFeatures, sequence: Sequence, rows: int, config: SchedulerConfig) -> None:
    start, tail = sequence.virtual + sequence.computed, int(rows == sequence.remaining)
    request = sequence.request
    features[request.base].add_inference(start, rows, tail, request.adapter, sequence.offloaded)


def _held_longest(sequence: Sequence) -> tuple[bool, float, int]:
    """Sort key: newcomers first, then by time since the last token."""
    return (not sequence.request.newcomer, sequence.newest_at or sequence.request.arrival, sequence.key)
