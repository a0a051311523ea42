"""Sequences that are longer than the device's pages: all their keys and values lie in the second tier.

Symbiosis 3.4. A sequence is offloaded for its whole life, as its pages on the device could never be enough.
Its rows pass in the same steps as all others; attention reads its keys and values chunk by chunk.
"""

from collections.abc import Sequence as Ordered
from itertools import count

from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.swap_tier import SwapTier


class Offloading:
    """A base's `pages` in the second tier for sequences that lie there as a whole, numbered from `first` on.
    They have the bytes of a `tier` in common with copies. `refusal` says why there are no pages."""

    def __init__(
        self, tier: SwapTier, first: int = 0, pages: int = 0, page_size: int = 1, refusal: str = ""
    ) -> None:
        self.pool = PagePool(pages, page_size)
        self._tier, self._first, self._refusal = tier, first, refusal
        self._page_nbytes = tier.nbytes // max(pages, 1)  # at least what a page takes

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self.pool.pages

    @property
    def used(self) -> int:
        """Pages of sequences."""
        return self.pool.pages - self.pool.free_count

    @property
    def used_share(self) -> float:
        """Share of the pages that sequences have."""
        return self.used / max(self.pages, 1)

    def refusal(self, request: Request, tokens: int) -> str:
        """Says why a request of at most `tokens` cached ones cannot be offloaded; empty if it can."""
        if not self.pages:
            return f"none are elsewhere: {self._refusal}" if self._refusal else "none are elsewhere"
        if request.traits.virtual:
            return "sequences with an adapter's virtual tokens cannot lie elsewhere"
        if self.pool.pages_for(tokens) > self.pages:
            return f"{self.pages} elsewhere (engine.swap_space)"
        return ""

    def room(self, prompt: int) -> int:
        """Most tokens of an answer to `prompt` tokens; less than one where the prompt does not fit."""
        return self.pages * self.pool.page_size - prompt + 1

    def enter(self, sequence: Sequence) -> bool:
        """Gives a sequence all pages that it will ever need; False, with nothing changed, where so many are
        not free."""
        pages = self.pool.pages_for(sequence.longest - 1)
        if pages > self.pool.free_count or not self._tier.make_room(pages * self._page_nbytes):
            return False
        taken = self.pool.allocate(sequence.key, pages)
        assert taken is not None, "so many are free"
        self._tier.used += pages * self._page_nbytes
        sequence.pages = [self._first + page for page in taken]
        return True

    def leave(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence."""
        self._tier.used -= self.pool.free(sequence.key) * self._page_nbytes
        sequence.pages = []


class OffloadTurns:
    """Turns of offloaded sequences, whatever their base: they read from one memory."""

    def __init__(self) -> None:
        self._rests_until = -float("inf")
        self._count = count(1)
        self._turns: dict[int, int] = {}  # number of the last turn of each offloaded sequence, by key

    def resting(self, sequences: Ordered[Sequence], now: float) -> frozenset[int]:
        """Keys of offloaded `sequences`, running or waiting, that have no rows in a step at `now`.

        While other sequences are ready to run, offloaded ones take turns, one in a step. After its turn one
        rests for as long as reading its keys and values took. So reading for long prompts takes at most half
        of the time, and the others wait for at most one of them between two tokens.
        """
        others = [one for one in sequences if not (one.offloaded or one.loading)]
        offloaded = {one.key: self._turns.get(one.key, 0) for one in sequences if one.offloaded}
        self._turns = offloaded
        if not (others and offloaded):
            return frozenset()
        ready = [one.key for one in sequences if one.offloaded and one.remaining]
        if not ready or (now < self._rests_until and any(one.pages for one in others)):
            return frozenset(offloaded)
        chosen = min(ready, key=offloaded.__getitem__)
        offloaded[chosen] = next(self._count)  # its turn counts also where no pages are free for it
        return frozenset(offloaded.keys() - {chosen})

    def read(self, seconds: float, now: float) -> None:
        """Notes that a step which ended at `now` waited `seconds` for offloaded keys and values."""
        if seconds:
            self._rests_until = max(self._rests_until, now) + seconds
