"""Blocks requests until their adapters are in memory, and has these loaded."""

from typing import Final

from coserve.adapters.paging.cache import AdapterCache
from coserve.adapters.paging.reader import Reads
from coserve.core.sequence import Sequence
from coserve.errors import CoserveError
from coserve.schedule.open_requests import OpenRequests

_PATIENT: Final = 4  # steps for which blocked requests give way to others, at most


class PagedAdapters:
    """Loads the stored adapters of one engine for its requests. All methods run between two steps, under the
    engine's lock.

    A request is blocked in the scheduler until its adapter is in memory, and pins the adapter until the
    request ends. Reading starts when the request is queued. Two prompts in one step delay its tokens most, so
    blocked requests enter one at a time, and for up to `_PATIENT` steps not beside other new requests.
    """

    def __init__(self, cache: AdapterCache, requests: OpenRequests, reads: Reads) -> None:
        self._cache, self._requests, self._reads = cache, requests, reads
        self._newest = 0  # key of the newest request seen running
        self._left_out = 0  # steps without an admission since one was ready

    def came(self, sequence: Sequence) -> None:
        """Handles a queued request for an adapter: unblocks it if the adapter is in memory, else has that
        read."""
        if not self._acquire(sequence):
            self._ask()
        elif sequence in self._requests.blocked_on_adapter:
            self._requests.unblock(sequence)

    def pin(self, key: str, pinned: bool) -> None:
        """Pins a version in memory, to be loaded when there is room, or unpins it. Raises what
        `AdapterCache.pin` does."""
        self._cache.pin(key, pinned)
        self._ask()

    def advance(self) -> None:
        """Notes loaded adapters, unblocks requests for them, and has the next ones read. Runs once a step."""
        for stored, outcome in self._reads.take():
            self._cache.loaded(stored.key, outcome)
            if isinstance(outcome, CoserveError):
                self._fail(stored.key, outcome)
        self._let_in(self._ask())

    # Inside

    def _acquire(self, sequence: Sequence) -> bool:
        return self._cache.acquire(_key(sequence), sequence.key)

    def _ask(self) -> list[Sequence]:
        """Has missing adapters of blocked requests read; returns the requests whose adapters are in
        memory."""
        ready, wanted = [], []
        for sequence in self._requests.blocked_on_adapter:
            if self._acquire(sequence):
                ready.append(sequence)
            else:
                wanted.append(_key(sequence))
        for key, error in self._cache.advance(wanted):
            self._fail(key, error)
        return ready

    def _let_in(self, ready: list[Sequence]) -> None:
        """Unblocks the most urgent of the `ready` unless other requests begin now; all of them on an idle
        engine."""
        newest = max((sequence.key for sequence in self._requests.waiting), default=0)
        others_begin, self._newest = newest > self._newest, max(newest, self._newest)
        if ready and others_begin and self._left_out < _PATIENT:
            self._left_out += 1
            return
        self._left_out = 0
        is_idle = not self._requests.running and not self._requests.waiting
        for sequence in ready if is_idle else ready[:1]:
            self._requests.unblock(sequence)

    def _fail(self, key: str, error: CoserveError) -> None:
        """Fails the requests blocked on this version."""
        for sequence in self._requests.blocked_on_adapter:
            if _key(sequence) == key:
                self._requests.fail(sequence.key, error)


def _key(sequence: Sequence) -> str:
    """Key of the adapter version of a blocked sequence."""
    key = sequence.request.adapter
    assert key is not None, "only what an adapter is for is kept back"
    return key
