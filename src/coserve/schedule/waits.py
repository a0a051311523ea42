"""Reasons of requests that wait in an engine, in words for who sent them."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from coserve.core.sequence import Sequence
from coserve.schedule.request_queues import RequestQueues

MOST_WAITS: Final = 64  # requests whose reasons are told, the most urgent ones


def reasons(queues: RequestQueues, held: bool) -> Iterator[tuple[str, str]]:
    """Ids of waiting requests with their reasons. `held`: the policy let no answers run in the newest
    step."""
    for sequence in islice(queues.waiting, MOST_WAITS):
        yield sequence.request.id, _reason(queues, sequence, held)
    for sequence in islice(queues.blocked_on_adapter, max(MOST_WAITS - len(queues.waiting), 0)):
        yield sequence.request.id, "its adapter's weights are being read"


def _reason(queues: RequestQueues, sequence: Sequence, held: bool) -> str:
    pages = queues.caches.of(sequence).pages
    needed = 0 if sequence.offloaded else pages.pages_for(sequence.virtual + sequence.length + 1)
    if held:
        why = "the policy holds answers back while it trains"
    elif queues.free_places <= 0:
        why = "all places for sequences are taken"
    elif needed > pages.free_count:
        why = f"it needs {needed} pages, and {pages.free_count} are free"
    else:
        why = "others' prompts come first in the next steps"
    return f"others took its pages: {why}" if sequence.preemptions else why
