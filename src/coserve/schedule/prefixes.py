"""Prefix sharing: pages with the common beginnings of sequences.

Two kinds of tokens are shared. *Virtual tokens* belong to an adapter version; its first sequence fills them.
*Found tokens* are a sequence's first ones that were computed before: in another prompt, in an answer that the
prompt continues, or in the sequence itself before it lost its pages. Sequences share full pages of either
kind. What is no longer on the device may be found in the second tier (`schedule.swapping`).

A sequence's own tokens need not start at a page boundary: virtual tokens may fill half a page, and the last
token of a fully found prompt is computed again for its logits. A page with a name is never written. So the
sequence's own first page begins with a copy of the shared one; or the shared one, if it has no other reader,
loses its name and becomes the sequence's own.

Pages before the token from which on an adapter acts have the base's names; the version enters into that of
the page with this token (`activated`).

Version keys must never be reused for other weights (`AdapterBank.next_version` ensures that): pages computed
with them can be found until they are reused.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from coserve.core.plan import InferenceSegment, Prefix, StateMove
from coserve.core.request import Request
from coserve.core.sequence import Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.cost import CostModel
from coserve.schedule.kept_states import KeptStates, is_kept, next_cut
from coserve.schedule.swapping import SwappedPrefixes, Swapping

_BYTES = 16


@dataclass(frozen=True, slots=True)
class _HeldOwner:
    """The owner of pages that are held for a swapped sequence."""

    key: int


class HeldPages:
    """Beginnings of swapped sequences. Nothing overwrites these pages while the sequences wait."""

    def __init__(self, pages: PagePool) -> None:
        self._pages = pages
        self._keys: set[int] = set()  # of sequences

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def hold(self, sequence: Sequence, count: int) -> None:
        """Keeps the first `count` pages of a sequence with tokens of its own while it has none."""
        held = sequence.pages[sequence.virtual // self._pages.page_size : count]
        if held:
            self._pages.allocate(_HeldOwner(sequence.key), 0, held)
            self._keys.add(sequence.key)

    def let_go(self, key: int) -> None:
        """Frees pages that were held for a sequence; they can be found until they are reused."""
        if key in self._keys:
            self._keys.remove(key)
            self._pages.free(_HeldOwner(key))

    def let_all_go(self) -> bool:
        """Frees all pages that were held; tells whether there were any."""
        held = sorted(self._keys)
        for key in held:
            self.let_go(key)
        return bool(held)


class Prefixes:
    """Pages of sequences, shared ones included. Without `sharing` only virtual tokens are shared. Pages that
    nobody reads may be `swapped`. Of a base with recurrent layers tokens are found where the state behind
    them is kept, too (`states`)."""

    def __init__(
        self,
        pages: PagePool,
        sharing: bool,
        swapped: SwappedPrefixes | None = None,
        states: KeptStates | None = None,
    ) -> None:
        self._pages = pages
        self._sharing = sharing
        self.swapped = SwappedPrefixes(Swapping(CostModel()), pages) if swapped is None else swapped
        self._unfilled: list[Prefix] = []
        self.states = states
        self.held = HeldPages(pages)

    def pages_for(self, virtual: int, tokens: int) -> int:
        """Pages that `tokens` tokens need after the full pages of `virtual` virtual ones."""
        return self._pages.pages_for(virtual + tokens) - virtual // self._pages.page_size

    def rows(self, request: Request) -> int:
        """Rows of virtual tokens to compute before a sequence of this request can run."""
        return request.traits.virtual_rows if self._virtual_pages(request) is None else 0

    def look_up(self, sequence: Sequence) -> None:
        """Counts the tokens found in the cache and in the second tier for a waiting sequence as computed.

        Continues where the last call stopped, so each page is looked up once; pages evicted since then are
        noticed only when the sequence enters. With a swapped copy all its tokens count.
        """
        if sequence.swapped is not None:
            sequence.computed = sequence.swapped.tokens
            return
        if not self._takes_part(sequence) or self._most(sequence) <= 0:
            return
        at = sequence.virtual % self._pages.page_size
        hits = self._pages.pages_for(at + sequence.computed) if sequence.computed else 0
        while hits and not self._is_known(sequence, hits - 1):
            hits -= 1
        while self._is_known(sequence, hits):
            hits += 1
        sequence.computed = self._usable(sequence, hits)

    def enter(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a sequence pages for `tokens` tokens after its version's virtual ones; all or nothing.

        Tokens found in the cache count as computed, and so do those of a swapped copy that reaches further,
        or of pages in the second tier that go on from there: these are to be read into the `filled` ones.
        """
        request, pages = sequence.request, self._pages
        first = request.traits.virtual // pages.page_size  # page with a token of its own
        found = self._find(sequence)
        computed = self._usable(sequence, len(found))
        full, rest = divmod(request.traits.virtual + computed, pages.page_size)
        read, begun = found[: full - first], found[full - first :][: rest > 0]
        swapped, filled, names = sequence.swapped, 0, list[bytes]()
        whole = 0 if swapped is None else (request.traits.virtual + swapped.tokens) // pages.page_size - first
        if swapped is not None and swapped.first <= first + len(found) and computed < swapped.tokens:
            read = found[:whole]
            computed, full, rest, begun = swapped.tokens, first + len(read), 0, []
            filled = swapped.first + swapped.pages - full
        elif names := self._readable(sequence, len(found)):
            computed, filled = self._usable(sequence, len(found) + len(names)), len(names)
            rest = 0  # the page that virtual tokens begin is read whole
        self.swapped.take(names)
        own = [page for page in begun if not pages.readers(page)]  # it loses its name and is written on
        virtual = self._virtual_pages(request)
        missing = pages.pages_for(request.traits.virtual) if virtual is None else 0
        wanted = missing + pages.pages_for(request.traits.virtual + tokens) - full - len(own)
        taken = pages.allocate(sequence.key, wanted, [*(virtual or ()), *read, *own])
        if taken is None:
            self.swapped.give_back(names)
            return False
        for page in own:
            pages.forget(page)
        if virtual is None:
            virtual, taken = taken[:missing], taken[missing:]
            self._fill(request, virtual)
        sequence.pages = [*virtual[:first], *read, *own, *taken]
        sequence.shared = sequence.named = full
        sequence.template = (begun or virtual[-1:])[0] if rest else None
        sequence.computed, sequence.filled = computed, filled
        if self.states is not None and swapped is not None and computed == swapped.tokens:
            self.states.bring_back(sequence)
        elif self.states is not None and computed:
            self.states.hold(sequence, self._name(sequence, computed // pages.page_size - 1))
        if names:
            self.swapped.load(sequence, names)
        return True

    def reads(self, sequence: Sequence) -> bool:
        """Tells whether a waiting sequence, if it enters now, has its beginning read from the second tier."""
        return not sequence.pages and bool(self._readable(sequence, len(self._find(sequence))))

    def leave(self, sequence: Sequence) -> None:
        """Frees all pages of a sequence; named ones can be found until they are reused."""
        self._pages.free(sequence.key)
        if self.states is not None:
            self.states.let_go(sequence)
            if sequence.swapped is None:
                self.states.forget(sequence)
        sequence.pages, sequence.shared, sequence.named, sequence.template = [], 0, 0, None
        sequence.filled = 0

    def common(self, sequence: Sequence) -> int:
        """Number of a running sequence's first pages that its copy does not need: other sequences read them,
        too, or any sequence of its adapter fills them."""
        count = sequence.virtual // self._pages.page_size
        while count < len(sequence.pages) and self._pages.readers(sequence.pages[count]) > 1:
            count += 1
        return count

    def reaches_copy(self, sequence: Sequence) -> bool:
        """Tells whether all pages before a sequence's copy are there."""
        assert sequence.swapped is not None, "it has a copy"
        before = sequence.swapped.first - sequence.virtual // self._pages.page_size
        return sequence.key in self.held or all(
            self._found(sequence, index) is not None for index in range(before)
        )

    def next_cut(self, sequence: Sequence) -> int:
        """The position at which a sequence's next rows end at the latest: before its adapter acts, and where
        its state is kept."""
        active = sequence.request.traits.active_from
        most = active if sequence.computed < active else sequence.length
        takes_part = self.states is not None and self._takes_part(sequence)
        return min(next_cut(sequence, self._pages.page_size), most) if takes_part else most

    def set_aside(self, sequence: Sequence) -> bool:
        """Has the next plan keep a preempted sequence's state beside its copy, where it has one; False where
        there is no place for it."""
        return self.states is None or self.states.set_aside(sequence)

    def state_moves(self, rows: Iterable[tuple[Sequence, InferenceSegment]]) -> tuple[StateMove, ...]:
        """States that a plan with these rows begins with, for sequences that no plan has named, and keeps."""
        if self.states is None:
            return ()
        moves = self.states.take_leaving()
        for sequence, segment in rows:
            if sequence.told is None and segment.start:
                moves.append(self.states.begin(sequence))
            end = segment.start + segment.length
            if self._takes_part(sequence) and is_kept(sequence, end, self._pages.page_size):
                moves += self.states.keep(sequence, self._name(sequence, end // self._pages.page_size - 1))
        return tuple(moves)

    def record(self, sequence: Sequence) -> None:
        """Names the pages of a running sequence that are full of known, computed tokens."""
        size, request = self._pages.page_size, sequence.request
        known = len(request.prompt) + len(sequence.output)
        full = (request.traits.virtual + min(sequence.computed, known)) // size
        if full == sequence.named:  # as behind most steps
            return
        if full > sequence.named and self._takes_part(sequence):
            for index in range(sequence.named, full):
                name = self._name(sequence, index - sequence.virtual // size)
                self._pages.name(sequence.pages[index], name)
        sequence.named = max(sequence.named, full)

    @property
    def has_unfilled(self) -> bool:
        """Tells whether the next plan fills pages with virtual tokens."""
        return bool(self._unfilled)

    def take_unfilled(self) -> tuple[Prefix, ...]:
        """Virtual tokens that got pages since the last call and have to be filled."""
        unfilled, self._unfilled = tuple(self._unfilled), []
        return unfilled

    # Virtual tokens

    def _virtual_pages(self, request: Request) -> list[int] | None:
        """Pages of the request's version; None where they have to be filled (again)."""
        found = [self._pages.find(name) for name in self._virtual_names(request)]
        pages = [page for page in found if page is not None]
        return pages if len(pages) == len(found) else None

    def _fill(self, request: Request, pages: list[int]) -> None:
        for page, name in zip(pages, self._virtual_names(request), strict=True):
            if (old := self._pages.find(name)) is not None:  # some pages may still be there
                self._pages.forget(old)
            self._pages.name(page, name)
        assert request.adapter is not None, "virtual tokens are an adapter's"
        prefix = Prefix(request.adapter, tuple(pages), request.traits.virtual, request.traits.virtual_rows)
        self._unfilled.append(prefix)

    def _virtual_names(self, request: Request) -> list[tuple[str, str, int]]:
        pages = self._pages.pages_for(request.traits.virtual)
        return virtual_names(request, pages) if pages else []

    # Found tokens

    def _takes_part(self, sequence: Sequence) -> bool:
        return self._sharing and sequence.request.scope is not None and not sequence.offloaded

    def _most(self, sequence: Sequence) -> int:
        """Most tokens it may find: all but the last one and those to be scored; none where all are
        pooled."""
        request = sequence.request
        if request.sampling.pooling == "mean":
            return 0
        scored = len(request.prompt) - 1
        if request.sampling.prompt_logprobs is not None and sequence.reported < scored:
            return sequence.reported
        return sequence.length - 1

    def _usable(self, sequence: Sequence, hits: int) -> int:
        """Own tokens that `hits` found pages cover."""
        size, most = self._pages.page_size, self._most(sequence)
        if self.states is not None:
            hits = min(hits, most // size)
            while hits > 0 and self._name(sequence, hits - 1) not in self.states:
                hits -= 1
            return max(hits, 0) * size
        return max(min(hits * size - sequence.virtual % size, most), 0)

    def _find(self, sequence: Sequence) -> list[int]:
        """Cached pages with its first tokens."""
        found: list[int] = []
        if self._takes_part(sequence):
            while (page := self._found(sequence, len(found))) is not None:
                found.append(page)
        return found

    def _found(self, sequence: Sequence, index: int) -> int | None:
        """The cached page with the name of its page `index`; index 0 is the first page with an own token."""
        name = self._known_name(sequence, index)
        return None if name is None else self._pages.find(name)

    def _is_known(self, sequence: Sequence, index: int) -> bool:
        """Tells whether the contents of its page `index` are cached or in the second tier."""
        name = self._known_name(sequence, index)
        return name is not None and (self._pages.find(name) is not None or name in self.swapped)

    def _readable(self, sequence: Sequence, found: int) -> list[bytes]:
        """Names of the pages in the second tier behind its `found` cached ones, as far as reading them is
        worth it."""
        names: list[bytes] = []
        if not len(self.swapped) or not self._takes_part(sequence):
            return names
        while (name := self._known_name(sequence, found + len(names))) is not None and name in self.swapped:
            names.append(name)
        size = self._pages.page_size
        at = sequence.virtual % size
        count = self._pages.pages_for(at + self._usable(sequence, found + len(names))) - found
        start = max(found * size - at, 0)
        return names[: self.swapped.worth_reading(sequence, start, count)] if count > 0 else []

    def _known_name(self, sequence: Sequence, index: int) -> bytes | None:
        """The name of its page `index` where all tokens in it are known."""
        size = self._pages.page_size
        if (index + 1) * size - sequence.virtual % size > sequence.known:
            return None
        return self._name(sequence, index)

    def _name(self, sequence: Sequence, index: int) -> bytes:
        """The name of a page whose tokens are known; computed once, in order."""
        names, size = sequence.names, self._pages.page_size
        at = sequence.virtual % size  # virtual tokens in the first of the pages
        while len(names) <= index:
            start, end = max(len(names) * size - at, 0), (len(names) + 1) * size - at
            before = names[-1] if names else root(sequence.request)
            if start <= sequence.request.traits.active_from < end:
                before = activated(before, sequence.request)
            names.append(page_name(before, sequence.tokens(start, end - start)))
        return names[index]


def root(request: Request) -> bytes:
    """The name before a request's first own page."""
    digest = blake2b(digest_size=_BYTES)
    is_base = request.traits.of_base or request.traits.active_from > 0
    chain = "" if is_base else request.adapter or ""
    for part in (request.scope or "", request.base, chain, str(request.traits.virtual)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # or "ab", "c" would be "a", "bc"
        digest.update(encoded)
    return digest.digest()


def activated(before: bytes, request: Request) -> bytes:
    """The name before the page from which on a request's adapter acts; that of the page before it where the
    adapter acts on all or its keys and values are the base's."""
    if not request.traits.active_from or request.traits.of_base:
        return before
    acts = f"{request.traits.active_from} {request.adapter}".encode()
    return blake2b(before + acts, digest_size=_BYTES).digest()


def page_name(before: bytes, tokens: Iterable[int]) -> bytes:
    """The name of a page with these tokens that follows the page named `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=_BYTES).digest()


def virtual_names(request: Request, pages: int) -> list[tuple[str, str, int]]:
    """Names of the pages of the virtual tokens that a request's adapter version has."""
    assert request.adapter is not None, "virtual tokens are an adapter's"
    return [("virtual", request.adapter, index) for index in range(pages)]
