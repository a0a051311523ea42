"""A newcomer's first token goes before others' work: its tenant has used less than its share of the machine.

A step that has its prompt holds no training, and of others' next tokens only as many as keep the step within
`SLOWER` times what the prompt takes alone: those that were held back longest come first. A newcomer enters at
once, at the cost of whoever else came last. So its first token takes at most `SLOWER` times as long as alone,
and what was left of the step under way when it came.
"""

from collections.abc import Iterable
from typing import Final

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel, Features

INFINITE = float("inf")
SLOWER: Final = 2.0
LATELY: Final = 60.0  # seconds in which another newcomer is expected: training runs in short pieces meanwhile


def is_new(sequence: Sequence) -> bool:
    """Tells whether this is a newcomer that waits for its first token."""
    return sequence.request.newcomer and sequence.newest_at is None


def step_limit(running: Iterable[Sequence], cost: CostModel, config: SchedulerConfig) -> float:
    """Seconds that others' rows may make a step last; infinite where no newcomer waits."""
    features, left = Features(), config.max_prefill_rows
    for sequence in filter(is_new, running):
        rows = min(sequence.remaining, left)
        left -= rows
        _add(features, sequence, rows, config)
    return SLOWER * cost.predict_features(features) if left < config.max_prefill_rows else INFINITE


def decoding(running: Iterable[Sequence], cost: CostModel, config: SchedulerConfig) -> list[Sequence]:
    """Running sequences that have their next token in this step: newcomers, then the others as they came.

    Who needs pages takes them from the last in this order, never from one whose row is in the step.
    """
    running = list(running)
    ready = sorted((one for one in running if one.remaining == 1), key=lambda one: not one.request.newcomer)
    limit = step_limit(running, cost, config)
    if limit == INFINITE:
        return ready
    features, chosen = Features(), set[int]()
    for sequence in filter(is_new, running):
        _add(features, sequence, min(sequence.remaining, config.max_prefill_rows), config)
    for sequence in sorted(ready, key=_held_longest):
        if not is_new(sequence):
            _add(features, sequence, 1, config)
        if not sequence.request.newcomer and cost.predict_features(features) > limit:
            break
        chosen.add(sequence.key)
    return [sequence for sequence in ready if sequence.key in chosen]


def _add(features: Features, sequence: Sequence, rows: int, config: SchedulerConfig) -> None:
    start, tail = sequence.virtual + sequence.computed, int(rows == sequence.remaining)
    features.add_inference(start, rows, tail, sequence.request.adapter)


def _held_longest(sequence: Sequence) -> tuple[bool, float, int]:
    """Newcomers that are being answered first, then by how long ago the last token came."""
    return (not sequence.request.newcomer, sequence.newest_at or sequence.request.arrival, sequence.key)
