"""The room for pages at instances that have fewer of them than their scheduler."""

from collections import Counter
from collections.abc import Iterable


class PageRoom:
    """The scheduler's record of the places of an instance. Pages that tasks use stay as long as these hold
    them; `wanted` are the pages of open sequences whose rows were there last, each as often as it is read."""

    def __init__(self, places: int) -> None:
        self.size = places
        self._free = list(range(places))
        self._places: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        self.wanted: Counter[int] = Counter()

    @property
    def pages(self) -> Iterable[int]:
        """The pages that have a place."""
        return self._places.keys()

    @property
    def free(self) -> int:
        """Places that no page has."""
        return len(self._free)

    def of(self, pages: Iterable[int]) -> tuple[int, ...]:
        """The places of pages, which all have one."""
        return tuple(self._places[page] for page in pages)

    def lacks(self, pages: Iterable[int]) -> int:
        """The number of these pages that have no place."""
        return sum(page not in self._places for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Gives pages a place and keeps them there, once more for each time that they are held. Raises
        IndexError where there are not enough."""
        for page in pages:
            if page not in self._places:
                self._places[page] = self._free.pop()
            self._held[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Ends one holding of pages, which stay as long as nobody needs their places."""
        for page in pages:
            if self._held[page] > 1:
                self._held[page] -= 1
            else:
                del self._held[page]

    def is_held(self, page: int) -> bool:
        """Tells whether a task uses a page."""
        return page in self._held

    def drop(self, page: int) -> None:
        """Frees the place of a page, if it has one."""
        if (place := self._places.pop(page, None)) is not None:
            self._free.append(place)
