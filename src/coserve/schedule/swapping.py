"""The second tier of pages: keys and values are read again instead of computed again.

As vLLM's swapping, and Symbiosis' caches elsewhere (3.4), but chosen anew for each preemption, by the
predicted seconds of computing the tokens again and those of writing and reading their pages. Pages of
prefixes (`schedule.swapped_prefixes`) take the room that is left.
"""

from collections.abc import Iterable
from itertools import islice

from coserve.core.plan import SwapIn
from coserve.core.sequence import Sequence, SwapCopy
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.swap_tier import SwapCopies, SwapTier


class Swapping:
    """Room and cost of a base's `pages` in a `tier`, of `page_nbytes` each, and the copies of them. `cost` is
    that of the base's steps."""

    def __init__(
        self,
        cost: CostModel,
        pages: int = 0,
        tier: SwapTier | None = None,
        page_nbytes: int = 1,
    ) -> None:
        self.cost = cost
        self.tier = SwapTier(pages * page_nbytes) if tier is None else tier
        self.copies = SwapCopies(self.tier, pages, page_nbytes)

    def is_worth(self, sequence: Sequence, start: int, pages: int, now: float) -> bool:
        """Tells whether moving `pages` there and back takes less than computing the tokens from `start` on
        again, and there is room."""
        if pages <= 0 or pages > self.copies.room or not self.copies.may_write(pages, now):
            return False
        writing, reading = self.seconds(pages, now)
        rows, adapter = sequence.computed - start, sequence.request.adapter
        return writing + reading < added_seconds(self.cost, sequence.virtual + start, rows, adapter)

    def is_sooner(self, sequence: Sequence, start: int) -> bool:
        """Tells whether reading a sequence's copy takes less than computing its tokens from `start` on."""
        copy, adapter = sequence.swapped, sequence.request.adapter
        assert copy is not None, "it has been written"
        if self.copies.is_stuck:
            return False
        computing = added_seconds(self.cost, sequence.virtual + start, copy.tokens - start, adapter)
        return self.seconds(copy.pages, self.tier.now)[1] < computing

    def seconds(self, pages: int, now: float) -> tuple[float, float]:
        """Predicted seconds of writing and of reading so many pages."""
        nbytes = pages * self.copies.page_nbytes
        return nbytes * self.tier.writing.seconds(now), nbytes * self.tier.reading.seconds(now)

    # Copies

    def write(self, sequence: Sequence, first: int, end: int) -> None:
        """Has the plan copy pages [first, end) of a sequence's block table, with all that it has computed."""
        has_room, most = self.copies.make_room(end - first), self.copies.most
        assert has_room, "`is_worth` has found it"
        starts = range(first, end, most)
        numbers = tuple(islice(self.tier.numbers, len(starts)))
        sequence.swapped = SwapCopy(numbers, most, first, end - first, sequence.computed)
        for number, start in zip(numbers, starts, strict=True):
            self.copies.add(number, tuple(sequence.pages[start : min(start + most, end)]))
            self.copies.owners[number] = sequence

    def read(self, sequence: Sequence) -> None:
        """Has the plan fill the pages behind those that a sequence shares from its copy."""
        copy = sequence.swapped
        assert copy is not None, "what is read was written"
        names = []
        for place, number in enumerate(copy.numbers):
            begin, end = copy.first + place * copy.each, copy.first + min((place + 1) * copy.each, copy.pages)
            first = max(begin, sequence.shared)
            if first < end:
                pages = tuple(sequence.pages[first:end])
                self.copies.moves.back[number] = SwapIn(number, pages, first - begin)
                names.append(number)
        sequence.loading = tuple(names)

    def read_single(self, sequence: Sequence, names: Iterable[bytes]) -> None:
        """Has the plan fill a sequence's pages behind the shared ones from copies of one page each."""
        sequence.loading = tuple(names)
        for name, page in zip(sequence.loading, sequence.pages[sequence.shared :], strict=False):
            self.copies.moves.back[name] = SwapIn(name, (page,))
            self.copies.owners[name] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Gives up reading for a sequence that loses its pages again. It keeps a copy of its own that no plan
        has read yet."""
        names, sequence.loading = sequence.loading, ()
        for name in names:
            self.copies.moves.back.pop(name, None)
            if sequence.swapped is None or name not in sequence.swapped.numbers:
                self._remove(name)

    def drop(self, sequence: Sequence) -> None:
        """Drops the copy of a sequence that needs it no longer, if there is one."""
        copy, sequence.swapped = sequence.swapped, None
        for number in () if copy is None else copy.numbers:
            self._remove(number)

    def _remove(self, name: int | bytes) -> None:
        del self.copies.owners[name]
        self.copies.remove(name)
