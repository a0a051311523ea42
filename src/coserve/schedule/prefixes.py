"""Pages of virtual tokens: one copy for each adapter version, while a running sequence uses it."""

from collections import Counter

from coserve.core.plan import Prefix
from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool


class Prefixes:
    """Who uses which version's virtual tokens, and the pages these lie in.

    Sequences read the full pages where they are. A page that is full in part only is a template, which each
    sequence copies into its own first page, as its own tokens go on there.

    What nobody uses is freed at once: keys of versions may come again with other weights, and a page that
    waits for a user is one that a running sequence could be preempted for.
    """

    def __init__(self, pages: PagePool) -> None:
        self._pages = pages
        self._users: Counter[str] = Counter()
        self._unfilled: dict[str, Prefix] = {}

    def pages_for(self, virtual: int, tokens: int) -> int:
        """Pages of its own that a sequence of `tokens` tokens needs after `virtual` virtual ones."""
        return self._pages.pages_for(virtual + tokens) - virtual // self._pages.page_size

    def missing(self, request: Request) -> int:
        """Pages that the request's version has yet to be given."""
        return 0 if self._is_held(request) else self._pages.pages_for(request.virtual)

    def rows(self, request: Request) -> int:
        """Rows to pass through the model before a sequence of this request can run."""
        return 0 if self._is_held(request) else request.virtual_rows

    def enter(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a sequence pages for `tokens` tokens after its version's virtual ones, or nothing at all."""
        request = sequence.request
        own = self.pages_for(request.virtual, tokens)
        if own + self.missing(request) > self._pages.free_count:
            return False
        prefix = self._take(request)
        sequence.shared = request.virtual // self._pages.page_size
        sequence.template = prefix[-1] if len(prefix) > sequence.shared else None
        taken = self._pages.allocate(sequence.key, own)
        assert taken is not None, "there were enough"
        sequence.pages = [*prefix[: sequence.shared], *taken]
        return True

    def leave(self, sequence: Sequence) -> None:
        """Takes back all pages of a sequence, and the version's with those of its last one."""
        self._pages.free(sequence.key)
        sequence.pages, sequence.shared, sequence.template = [], 0, None
        adapter = sequence.request.adapter
        if sequence.virtual and adapter is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
                self._pages.free(_owner(adapter))
                self._unfilled.pop(adapter, None)

    def take_unfilled(self) -> tuple[Prefix, ...]:
        """What has got its pages since this was last asked, and is still used."""
        unfilled = tuple(self._unfilled.values())
        self._unfilled.clear()
        return unfilled

    def _is_held(self, request: Request) -> bool:
        return not request.virtual or request.adapter in self._users

    def _take(self, request: Request) -> list[int]:
        """The pages of the request's version, for one more user."""
        if not request.virtual:
            return []
        adapter = request.adapter
        assert adapter is not None, "virtual tokens are an adapter's"
        if not self._users[adapter]:
            pages = self._pages.allocate(_owner(adapter), self._pages.pages_for(request.virtual))
            assert pages is not None, "there were enough"
            self._unfilled[adapter] = Prefix(adapter, tuple(pages), request.virtual, request.virtual_rows)
        self._users[adapter] += 1
        return self._pages.owners[_owner(adapter)]


def _owner(adapter: str) -> tuple[str, str]:
    return "virtual", adapter
