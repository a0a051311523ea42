"""Prefixes in the second tier: cached pages move there when they are evicted, and are found by content.

LMCache and SGLang's HiCache keep prefixes so. Whether a page is written is decided by the predicted seconds
of computing its tokens again, those of writing and reading it, and the share of such pages read lately.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Ordered
from typing import Final

from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.cost import added_seconds
from coserve.schedule.swapping import Swapping

_MEMORY: Final = 0.999  # of the pages counted for the share that is read: some thousand evictions


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
