"""The page pool: readers and contents of the key-value cache's pages.

A page holds the keys and values of `page_size` consecutive tokens. Its readers are *owners*, any hashable
values: here keys of sequences, whose pages cover every layer. A page may have a *name* that identifies its
contents; an owner that finds the name reads the page instead of computing it again. A page with a name is
never written.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType


class PagePool:
    """Hands out `pages` pages of `page_size` tokens each; every operation is O(log n) per page.

    A page without readers is free; with a name it can be found until it is handed out again. Unnamed pages
    are handed out first (the lowest number first, so that a sequence's pages tend to lie side by side: a CPU
    reads them up to three times as fast as scattered ones), then named ones, least recently found first,
    after a call of `evicted` with page and name. The pool holds page numbers only.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        assert pages >= 0 and page_size >= 1, "a pool holds whole pages of at least one token"
        self.pages = pages
        self.page_size = page_size
        self._fresh = 0  # this page and all behind it were never handed out
        self._blank: list[int] = []  # free again, with nothing in them that could be found; a heap
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and findable, least recently used first
        self._readers = [0] * pages
        self._owned: dict[Hashable, list[int]] = {}
        self._names: dict[int, Hashable] = {}
        self._found: dict[Hashable, int] = {}  # pages by name
        self.evicted: Callable[[int, Hashable], None] = lambda page, name: None

    @property
    def free_count(self) -> int:
        """Number of pages without readers, findable or not."""
        return self.pages - self._fresh + len(self._blank) + len(self._idle)

    @property
    def cached_count(self) -> int:
        """Number of free pages whose contents can be found."""
        return len(self._idle)

    @property
    def owners(self) -> Mapping[Hashable, list[int]]:
        """Every owner's pages: shared ones first, then in order of allocation."""
        return MappingProxyType(self._owned)

    def pages_for(self, tokens: int) -> int:
        """Pages needed to hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def readers(self, page: int) -> int:
        """Number of owners that read a page."""
        return self._readers[page]

    def allocate(self, owner: Hashable, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Allocates `count` pages for `owner`, and makes it a reader of those in `shared`.

        None, with nothing changed, when fewer are free. Allocated pages hold arbitrary data; they come in
        ascending order.
        """
        assert owner is not None and count >= 0, "pages are given to somebody, and not taken back here"
        if count > self.free_count - sum(not self._readers[page] for page in shared):
            return None
        for page in shared:
            self._idle.pop(page, None)
            self._readers[page] += 1
        taken = sorted(self._take() for _ in range(count))
        if shared or taken:
            self._owned.setdefault(owner, []).extend((*shared, *taken))
        return taken

    def give_back(self, owner: Hashable, count: int) -> None:
        """Frees the last `count` pages that `owner` was given, which nobody else reads and which have no
        name."""
        for _ in range(count):
            page = self._owned[owner].pop()
            self._readers[page] -= 1
            assert not self._readers[page] and page not in self._names, f"page {page} is of use to others"
            self._lay_down(page)

    def free(self, owner: Hashable) -> int:
        """Frees all pages of `owner`; returns their number.

        Its last pages are reused first: a page is useless without those before it.
        """
        pages = self._owned.pop(owner, [])
        for page in reversed(pages):
            self._readers[page] -= 1
            assert self._readers[page] >= 0, f"page {page} was freed more often than given"
            if not self._readers[page]:
                self._lay_down(page)
        return len(pages)

    # Names

    def find(self, name: Hashable) -> int | None:
        """The page of this name, None if there is none."""
        return self._found.get(name)

    def name(self, page: int, name: Hashable) -> None:
        """Names the contents of a page with readers. A page that has the name already keeps it."""
        assert self._readers[page] and page not in self._names, f"page {page} cannot be given a name"
        if self._found.setdefault(name, page) == page:
            self._names[page] = name

    def forget(self, page: int) -> None:
        """Removes a page's name, so that it is not found; its readers keep it."""
        del self._found[self._names.pop(page)]
        if not self._readers[page]:
            del self._idle[page]
            self._lay_down(page)

    def is_named(self, page: int) -> bool:
        """Tells whether a page has a name, and so must not be written."""
        return page in self._names

    def _lay_down(self, page: int) -> None:
        if page in self._names:
            self._idle[page] = None
        else:
            heappush(self._blank, page)

    def _take(self) -> int:
        if self._blank:
            page = heappop(self._blank)
        elif self._fresh < self.pages:
            page, self._fresh = self._fresh, self._fresh + 1
        else:
            page, _ = self._idle.popitem(last=False)
            name = self._names.pop(page)
            del self._found[name]
            self.evicted(page, name)
        assert not self._readers[page], f"page {page} is handed out, and somebody reads it"
        self._readers[page] = 1
        return page
