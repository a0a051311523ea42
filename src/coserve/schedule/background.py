"""Background requests, as those of batches: below everything else.

While another request is open none of their prompt rows pass, and only as many of their decode rows as leave
the step within `SLOWER` times what the others' rows alone take: all of them where rows are nearly free, none
where each costs its own. They give up their places, and their pages, to requests that wait.
"""

from collections.abc import Iterable
from typing import Final

from coserve.core.sequence import Sequence
from coserve.schedule.features import StepFeatures
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.step_costs import StepCosts

SLOWER: Final = 1.03


def make_way(queues: RequestQueues, now: float) -> None:
    """Preempts background sequences, the latest first, until the others that wait would find places and
    pages."""
    held = [one for one in queues.running if one.request.background and not one.offloaded]
    for base in {one.request.base for one in held}:
        own = [one for one in held if one.request.base == base]
        waiting = [one for one in queues.waiting if not one.request.background and one.request.base == base]
        pages = queues.caches[base].pages
        needed = sum(pages.pages_for(one.virtual + one.length + 1) for one in waiting)
        needed += len(queues.running)  # a running sequence may need one more in this step
        while own and waiting and (needed > pages.free_count or queues.free_places < len(waiting)):
            queues.preempt(own.pop(), now)


def resting(running: Iterable[Sequence], waiting: Iterable[Sequence], cost: StepCosts) -> frozenset[int]:
    """Keys of background sequences without rows in this step."""
    running, open_ones = list(running), list(waiting)
    background = {one.key for one in (*running, *open_ones) if one.request.background}
    if len(background) == len(running) + len(open_ones):
        return frozenset()
    features = StepFeatures()
    for one in running:
        if one.key not in background and one.remaining == 1:
            _add(features, one)
    limit = SLOWER * cost.predict_features(features)
    for one in running if features else ():
        if one.key in background and one.remaining == 1:
            _add(features, one)
            if cost.predict_features(features) > limit:
                break
            background.discard(one.key)
    return frozenset(background)


def _add(features: StepFeatures, sequence: Sequence) -> None:
    request, context = sequence.request, sequence.virtual + sequence.computed
    features[request.base].add_inference(context, 1, 1, request.adapter, sequence.offloaded)
