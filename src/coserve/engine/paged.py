"""Requests and the adapters that they need: who is let in, and what is brought in for whom."""

from typing import Final

from coserve.adapters.paging.cache import AdapterCache
from coserve.adapters.paging.reader import Reads
from coserve.core.sequence import Sequence
from coserve.errors import CoserveError
from coserve.schedule.scheduler import Scheduler

_PATIENT: Final = 4  # steps that a prompt from afar leaves to others, at most


class PagedAdapters:
    """The stored adapters of one engine. Everything happens between two steps, under the engine's lock.

    A request for one that is not in memory is kept back from the scheduler until it is, and holds it from
    then until it ends. Reading begins when the request is queued. Requests for others never notice: those
    that were kept back enter one by one, and not in a step in which others begin, as long as that does not
    take long. (Two prompts in a step are what its tokens wait for longest.)
    """

    def __init__(self, cache: AdapterCache, scheduler: Scheduler, reads: Reads) -> None:
        self._cache, self._scheduler, self._reads = cache, scheduler, reads
        self._newest = 0  # key of the last request that was seen to begin
        self._left_out = 0  # steps that nobody has entered in since somebody was ready

    def came(self, sequence: Sequence) -> None:
        """A request for an adapter has been queued; it is kept back if the adapter is a stored one."""
        if not self._acquire(sequence):
            self._ask()
        elif sequence in self._scheduler.blocked_on_adapter:
            self._scheduler.unblock(sequence)

    def pin(self, key: str, pinned: bool) -> None:
        """Has a version brought in when there is room and kept, or no longer. Raises what `AdapterCache.pin`
        does."""
        self._cache.pin(key, pinned)
        self._ask()

    def advance(self) -> None:
        """Takes in what has been read, lets in who waited for it, and has the next ones read. Once a step."""
        for stored, outcome in self._reads.take():
            self._cache.loaded(stored.key, outcome)
            if isinstance(outcome, CoserveError):
                self._fail(stored.key, outcome)
        self._let_in(self._ask())

    # Inside

    def _acquire(self, sequence: Sequence) -> bool:
        return self._cache.acquire(_key(sequence), sequence.key)

    def _ask(self) -> list[Sequence]:
        """Has what is not there read for those who are kept back; returns those who hold theirs."""
        ready, wanted = [], []
        for sequence in self._scheduler.blocked_on_adapter:
            if self._acquire(sequence):
                ready.append(sequence)
            else:
                wanted.append(_key(sequence))
        for key, error in self._cache.advance(wanted):
            self._fail(key, error)
        return ready

    def _let_in(self, ready: list[Sequence]) -> None:
        """The most urgent of those who are ready, if nobody else begins now; all if that holds up nobody."""
        newest = max((sequence.key for sequence in self._scheduler.waiting), default=0)
        others_begin, self._newest = newest > self._newest, max(newest, self._newest)
        if ready and others_begin and self._left_out < _PATIENT:
            self._left_out += 1
            return
        self._left_out = 0
        is_idle = not self._scheduler.running and not self._scheduler.waiting
        for sequence in ready if is_idle else ready[:1]:
            self._scheduler.unblock(sequence)

    def _fail(self, key: str, error: CoserveError) -> None:
        """Ends the requests that wait for this version, and no others."""
        for sequence in self._scheduler.blocked_on_adapter:
            if _key(sequence) == key:
                self._scheduler.fail(sequence.key, error)


def _key(sequence: Sequence) -> str:
    """Key of the version that a sequence which is kept back is for."""
    key = sequence.request.adapter
    assert key is not None, "only what an adapter is for is kept back"
    return key
