"""Requests and the adapters that they need: who is let in, and what is brought in for whom."""

from collections.abc import Callable
from typing import Final

from coserve.adapters.bank import AdapterBank
from coserve.adapters.paging.cache import AdapterCache
from coserve.adapters.paging.reader import Reads
from coserve.adapters.paging.stored import StoredVersion
from coserve.core.sequence import Sequence
from coserve.core.size import show_size
from coserve.errors import AdapterError, CoserveError, OutOfMemory
from coserve.schedule.scheduler import Scheduler
from coserve.wire.messages import Paging

_MOST_PINNED: Final = 0.5  # of the room: everybody else needs some
_PATIENT: Final = 4  # steps that a prompt from afar leaves to others, at most


class PagedAdapters:
    """The stored adapters of one engine. Everything happens between two steps, under the engine's lock.

    A request for one that is not in memory is kept back from the scheduler until it is, and holds it from
    then until it ends. Reading begins when the request is queued. Requests for others never notice: those
    that were kept back enter one by one, and not in a step in which others begin, as long as that does not
    take long. (Two prompts in a step are what its tokens wait for longest.)
    """

    def __init__(
        self, bank: AdapterBank, scheduler: Scheduler, reads: Reads, room: Callable[[], int]
    ) -> None:
        """`room` tells the bytes that all stored adapters in memory may have together."""
        self._bank, self._scheduler, self._reads, self._room = bank, scheduler, reads, room
        self._cache: AdapterCache[StoredVersion] = AdapterCache(self, room)
        self._hits = self._misses = self._loaded = 0
        self._loaded_bytes = self._evicted = 0
        self._loading = 0
        self._ready: set[int] = set()  # keys of those who hold their adapter and have not entered yet
        self._newest = 0  # key of the last request that was seen to begin
        self._left_out = 0  # steps that nobody has entered in since somebody was ready
        bank.when_forgotten(self._cache.forget)

    # For the engine

    @property
    def used(self) -> int:
        """Bytes of all that are in memory, or on their way."""
        return self._cache.used

    @property
    def copies(self) -> int:
        """Bytes of these that are for places in stacks."""
        return sum(item.cost - item.outline.nbytes for item in self._cache.items)

    def add(self, stored: StoredVersion) -> None:
        """A version that has a name from now on, and stays on disk until somebody asks for it."""
        self._cache.add(stored)
        self._bank.publish(stored)

    def needs(self, key: str) -> bool:
        """Tells whether requests for this version have to be kept back until it is in memory."""
        return key in self._cache

    def came(self, sequence: Sequence) -> None:
        """A request that is kept back has been queued."""
        key = sequence.request.adapter
        assert key is not None, "only what an adapter is for is kept back"
        there = self._cache.hold(key, sequence.key)
        self._hits, self._misses = self._hits + there, self._misses + (not there)
        if there:
            self._scheduler.unblock(sequence)
        else:
            self._ask()

    def went(self, sequence: Sequence) -> None:
        """A request has ended, or was given up."""
        self._ready.discard(sequence.key)
        if (key := sequence.request.adapter) is not None:
            self._cache.release(key, sequence.key)

    def pin(self, key: str, pinned: bool) -> None:
        """Has a version brought in when there is room and kept, or no longer. Raises AdapterError for one
        that is in memory in any case, OutOfMemory where pinned ones would have more than half of the room."""
        if key not in self._cache:
            raise AdapterError(f"the adapter {_name(key)!r} has no files to be read from again: it stays")
        most = int(_MOST_PINNED * self._room())
        if pinned and (missing := self._cache.pinned_with(key) - most) > 0:
            raise OutOfMemory(
                f"pinned adapters may have {show_size(most)}, half of what adapters may have in memory: "
                f"{show_size(missing)} less than with {_name(key)!r}"
            )
        self._cache.pin(key, pinned)
        self._ask()

    def shed(self, nbytes: int) -> None:
        """Drops what nobody uses until so many bytes are free, if that is enough for so many."""
        self._cache.shed(nbytes)

    def advance(self) -> None:
        """Takes in what has been read, lets in who waited for it, and has the next ones read. Once a step."""
        if self._loading:
            self._take_in()
        self._ask()
        self._let_in()

    def stats(self) -> Paging:
        """Counters since the start, and where things stand now."""
        return Paging(
            known=len(self._cache),
            resident=tuple(map(_name, self._cache.inside)),
            pinned=tuple(map(_name, self._cache.pinned)),
            hits=self._hits,
            misses=self._misses,
            loaded=self._loaded,
            loaded_bytes=self._loaded_bytes,
            dropped=self._evicted,
            used_bytes=self._cache.used,
        )

    # For the residence

    def load(self, item: StoredVersion) -> None:
        self._loading += 1
        self._reads.begin(item)

    def drop(self, item: StoredVersion) -> None:
        self._evicted += 1
        self._bank.send_out(item.key)

    # Inside

    def _take_in(self) -> None:
        for stored, outcome in self._reads.take():
            self._loading -= 1
            if isinstance(outcome, int):
                self._loaded += 1
                self._loaded_bytes += outcome
                self._cache.arrived(stored.key)
                self._bank.bring_in(stored.key, outcome)
            else:
                self._cache.failed(stored.key)
                self._fail(stored.key, outcome)

    def _ask(self) -> None:
        """Holds what is there for those who are kept back, and has what is not there read."""
        kept = [s for s in self._scheduler.blocked_on_adapter if s.key not in self._ready]
        if not kept and not self._cache.pinned:
            return
        wanted = []
        for sequence in kept:
            key = sequence.request.adapter
            assert key is not None, "only what an adapter is for is kept back"
            if self._cache.hold(key, sequence.key):
                self._ready.add(sequence.key)
            else:
                wanted.append(key)
        for key, error in self._cache.advance(wanted):
            self._fail(key, error)

    def _let_in(self) -> None:
        """The most urgent of those who are ready, if nobody else begins now; all if that holds up nobody."""
        newest = max((sequence.key for sequence in self._scheduler.waiting), default=0)
        others_begin, self._newest = newest > self._newest, max(newest, self._newest)
        ready = [sequence for sequence in self._scheduler.blocked_on_adapter if sequence.key in self._ready]
        if ready and others_begin and self._left_out < _PATIENT:
            self._left_out += 1
            return
        self._left_out = 0
        is_idle = not self._scheduler.running and not self._scheduler.waiting
        for sequence in ready if is_idle else ready[:1]:
            self._ready.remove(sequence.key)
            self._scheduler.unblock(sequence)

    def _fail(self, key: str, error: CoserveError) -> None:
        """Ends the requests that wait for this version, and no others."""
        for sequence in self._scheduler.blocked_on_adapter:
            if sequence.request.adapter == key:
                self._scheduler.fail(sequence.key, error)


def _name(key: str) -> str:
    """Name of the adapter that a version's key belongs to."""
    return key.rpartition("@")[0]
