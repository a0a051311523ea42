"""Sequences that are longer than the device's pages: all their keys and values lie in the second tier.

Symbiosis 3.4. A sequence is offloaded for its whole life, as its pages on the device could never be enough.
Its rows pass in the same steps as all others; attention reads its keys and values chunk by chunk.
"""

from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.swapping import Swapping


class Offloading:
    """The second tier's `pages` for sequences that lie there as a whole, numbered from `first` on. Copies of
    preempted sequences (`swapping`) share its bytes. `refusal` says why there are no pages."""

    def __init__(
        self, swapping: Swapping, first: int = 0, pages: int = 0, page_size: int = 1, refusal: str = ""
    ) -> None:
        self.pool = PagePool(pages, page_size)
        self._swapping, self._first, self._refusal = swapping, first, refusal

    @property
    def pages(self) -> int:
        """Pages in all."""
        return self.pool.pages

    @property
    def used(self) -> int:
        """Pages of sequences."""
        return self.pool.pages - self.pool.free_count

    def refusal(self, request: Request, tokens: int) -> str:
        """Says why a request of at most `tokens` cached ones cannot be offloaded; empty if it can."""
        if not self.pages:
            return f"none are elsewhere: {self._refusal}" if self._refusal else "none are elsewhere"
        if request.virtual:
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
        count = self.pool.pages_for(sequence.longest - 1)
        shared = self._share(count)
        if count > self.pool.free_count or not self._swapping.copies.make_room(shared):
            return False
        taken = self.pool.allocate(sequence.key, count)
        assert taken is not None, "so many are free"
        self._swapping.copies.used += shared
        sequence.pages = [self._first + page for page in taken]
        return True

    def leave(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence."""
        self._swapping.copies.used -= self._share(self.pool.free(sequence.key))
        sequence.pages = []

    def _share(self, count: int) -> int:
        """Pages of copies that take the bytes of `count` offloaded ones, which may be larger: they are in the
        base's type."""
        return -(-count * self._swapping.copies.pages // self.pages)
