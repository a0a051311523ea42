"""Who owns which page of the key-value cache.

A page holds the keys and values of `page_size` consecutive tokens. It belongs to an *owner*: for now the
key of a sequence, whose pages cover every layer. An owner may be any hashable value, so that a page can
come to belong to a sequence and a span of layers without this file changing.
"""

from collections.abc import Hashable, Mapping
from types import MappingProxyType


class PagePool:
    """Hands out `pages` pages of `page_size` tokens each; every operation is O(1) per page.

    The page freed last is handed out first, so that a small load keeps to pages that are warm in the
    device's caches. The pool knows numbers only; the tensors behind them live elsewhere.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        assert pages >= 0 and page_size >= 1, "a pool holds whole pages of at least one token"
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._owner: list[Hashable | None] = [None] * pages
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    @property
    def owners(self) -> Mapping[Hashable, list[int]]:
        """Every owner with its pages, in the order they were allocated."""
        return MappingProxyType(self._owned)

    def pages_for(self, tokens: int) -> int:
        """Pages needed to hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, owner: Hashable, count: int) -> list[int] | None:
        """`count` further pages for `owner`, or None (and nothing taken) when fewer are free."""
        assert owner is not None and count >= 0, "pages are given to somebody, and not taken back here"
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            assert self._owner[page] is None, f"page {page} already belongs to {self._owner[page]}"
            self._owner[page] = owner
        if taken:
            self._owned.setdefault(owner, []).extend(taken)
        return taken

    def free(self, owner: Hashable) -> int:
        """Takes back all pages of `owner`; returns how many there were."""
        pages = self._owned.pop(owner, [])
        for page in reversed(pages):
            assert self._owner[page] == owner, f"page {page} belongs to {self._owner[page]}, not {owner}"
            self._owner[page] = None
            self._free.append(page)
        return len(pages)
