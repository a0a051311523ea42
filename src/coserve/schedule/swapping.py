"""The second tier of pages: keys and values are read again instead of computed again.

As vLLM's swapping, and Symbiosis' caches elsewhere (3.4), but chosen anew for each preemption, by the
predicted seconds of computing the tokens again and those of writing and reading their pages. Pages of
prefixes (`SwappedPrefixes`) take the room that is left.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Ordered
from itertools import islice
from typing import Final

from coserve.core.plan import SwapIn
from coserve.core.sequence import Sequence, SwapCopy
from coserve.memory.pages import PagePool
from coserve.schedule.cost import CostModel, added_seconds
from coserve.schedule.swap_tier import SwapCopies, SwapTier

_MEMORY: Final = 0.999  # of the pages counted for the share that is read: some thousand evictions


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


class SwappedPrefixes:
    """Copies of cached pages, by their names. `written` and `read` count pages."""

    def __init__(self, swapping: Swapping, pages: PagePool) -> None:
        self.written = self.read = 0
        self._swapping = swapping
        self._page_size = pages.page_size
        self._copies = swapping.copies.evictable
        self._lately_written = self._lately_read = 0.0
        if swapping.copies.pages:
            pages.evicted = self.keep

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._copies

    def keep(self, page: int, name: Hashable) -> None:
        """Has the plan copy a page that is about to be overwritten, if that is worth it. An adapter's virtual
        tokens, whose names are no hashes, are filled again by the adapter."""
        if name in self._copies:
            self._copies.move_to_end(name)
            return
        copies = self._swapping.copies
        if not isinstance(name, bytes) or copies.is_moving(name) or not self._is_worth_writing():
            return
        if copies.make_room(1):
            copies.add(name, (page,))
            self._copies[name] = None
            self.written += 1
            self._lately_written += 1

    def _is_worth_writing(self) -> bool:
        """Tells whether copying a page gains time, at the recent share of written pages that are read. All
        are copied while none was written."""
        self._lately_written *= _MEMORY
        self._lately_read *= _MEMORY
        swapping, tier = self._swapping, self._swapping.tier
        writing, reading = swapping.seconds(1, tier.now)
        if not swapping.copies.may_write(1, tier.now):
            return False
        share = min((self._lately_read + 1) / (self._lately_written + 1), 1.0)
        return writing < share * (added_seconds(swapping.cost, 0, self._page_size) - reading)

    def worth_reading(self, sequence: Sequence, start: int, pages: int) -> int:
        """Number of `pages` copies, with a sequence's tokens from `start` on, that are read sooner than
        computed: all or none."""
        swapping, tier = self._swapping, self._swapping.tier
        seconds = swapping.seconds(1, tier.now)[1]
        rows, adapter = pages * self._page_size, sequence.request.adapter
        computing = added_seconds(swapping.cost, sequence.virtual + start, rows, adapter)
        return pages if pages * seconds < computing and tier.barred_until <= tier.now else 0

    def take(self, names: Iterable[bytes]) -> None:
        """Keeps copies that the plan is to read from being evicted."""
        for name in names:
            del self._copies[name]

    def give_back(self, names: Iterable[bytes]) -> None:
        """Undoes `take` where there are no pages to read into."""
        self._copies.update(dict.fromkeys(names))

    def load(self, sequence: Sequence, names: Ordered[bytes]) -> None:
        """Has the plan fill a sequence's pages behind the shared ones from copies that were taken."""
        self._swapping.read_single(sequence, names)
        self.read += len(names)
        self._lately_read += len(names)
