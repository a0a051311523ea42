"""Background requests, as those of batches: below everything else.

While another request is open none of their prompt rows pass, and only as many of their decode rows as leave
the step within `SLOWER` times what the others' rows alone take: all of them where rows are nearly free, none
where each costs its own. They give up their places, and their pages, to requests that wait.

Where others are always open that alone would hold them up for ever. So after `PATIENCE` seconds of rest they
take turns: one of them, the earliest that runs or else waits, has a decode row or a few prompt rows in a
step. After a turn that is predicted to cost c seconds the next is c / `SHARE` seconds later, so that all
turns together take at most that share of the time. A turn breaks no bound of the others, and takes no pages
from them: where these have all pages, or no time within their bounds, the background waits on.
"""

from collections.abc import Iterable
from typing import Final

from coserve.core.sequence import Sequence
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.features import StepFeatures
from coserve.schedule.plan_builder import PlanBuilder
from coserve.schedule.request_queues import RequestQueues
from coserve.schedule.step_costs import StepCosts

SLOWER: Final = 1.03
SHARE: Final = 0.02  # of the time, for turns
PATIENCE: Final = 1.0  # seconds of rest before the first turn: gaps between requests are mostly shorter


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


class BackgroundTurns:
    """Chooses the background sequences that rest in a step, and gives turns to those that rest for long."""

    def __init__(self) -> None:
        self.turn: int | None = None  # key of the sequence whose turn this step is
        self._cost = 0.0  # seconds that the turn is predicted to add to the step
        self._since: float | None = None  # when they began to rest
        self._next = 0.0  # when the next turn may be

    def resting(
        self,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        now: float,
        cost: StepCosts,
        config: SchedulerConfig,
    ) -> frozenset[int]:
        """Keys of background sequences without rows in this step."""
        running, waiting = list(running), list(waiting)
        every = [*running, *waiting]
        rest = {one.key for one in every if one.request.background}
        self.turn = None
        if not rest or len(rest) == len(every):
            self._since = None
            return frozenset()
        features = StepFeatures()
        for one in running:
            if one.key not in rest and one.remaining == 1:
                _add(features, one, 1)
        alone = features.copy()
        limit = SLOWER * cost.predict_features(features)
        for one in running if features else ():
            if one.key in rest and one.remaining == 1:
                _add(features, one, 1)
                if cost.predict_features(features) > limit:
                    break
                rest.discard(one.key)
        self._since = (now if self._since is None else self._since) if rest else None
        if self._since is not None and now >= max(self._since + PATIENCE, self._next):
            chosen = next(one for one in every if one.key in rest)
            _add(beside := alone.copy(), chosen, min(chosen.remaining, config.min_prefill_rows))
            seconds = cost.predict_features(beside)
            self._cost = seconds - cost.predict_features(alone)
            if not _is_pressing(every, now, seconds if chosen.remaining == 1 else 0.0):
                self.turn = chosen.key
                rest.discard(chosen.key)
        return frozenset(rest)

    def note(self, builder: PlanBuilder) -> None:
        """Notes whether the sequence whose turn this step is has rows in it."""
        if self.turn is not None and any(one.key == self.turn for one in builder.answering):
            self._next = builder.now + self._cost / SHARE


def _is_pressing(sequences: Iterable[Sequence], now: float, seconds: float) -> bool:
    """Tells whether a bound of the others would be broken by a step of so many seconds, or one on a first
    token is half used up. (Prompt rows are cut to bounds between tokens where they are packed.)"""
    for one in sequences:
        slo = one.request.slo
        if one.request.background:
            continue
        if one.newest_at is None:
            if slo.first_token is not None and now > one.request.arrival + slo.first_token / 2:
                return True
        elif slo.between_tokens is not None and now + seconds > one.newest_at + slo.between_tokens:
            return True
    return False


def _add(features: StepFeatures, sequence: Sequence, rows: int) -> None:
    request, context = sequence.request, sequence.virtual + sequence.computed
    tail = int(rows == sequence.remaining)
    features[request.base].add_inference(context, rows, tail, request.adapter, sequence.offloaded)
