"""Copies of pages that leave an instance when others need room there (BlockLLM, 5.1): those of sequences that
are over, and those that stay behind at an instance which their sequence has left, as `coordination.py` orders
them; then, as far as that is not enough, those of open sequences that no task uses, which are copied or
computed again once their rows come. Sequences that have ended are known as long as they may be resumed."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from coserve.cluster.choosing import held_tokens
from coserve.cluster.coordination import PagesCopy, redundant_copies, resumes_at, sweep_order
from coserve.cluster.hosted import HostedBlock, SequencePages, SequenceRows

_BEYOND: Final = 16  # a part of the room that is swept beyond what is needed: a sweep looks at all sequences


@dataclass(frozen=True, eq=False)
class _OpenSequence(SequencePages):
    """One that is open, and the instances where its rows were."""

    way: Sequence[HostedBlock] = ()


class PageSweeper:
    """The scheduler's record of open sequences, by which it makes room."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._open: dict[int, _OpenSequence] = {}
        self.swept = 0  # pages that have left for others

    def passed(self, rows: SequenceRows, way: Sequence[HostedBlock], now: float) -> None:
        """Rows have passed the instances on a way, which own the sequence's pages from now on."""
        tokens = rows.context + rows.length
        pages, before = tuple(rows.pages[: -(-tokens // self._size)]), self._open.get(rows.key)
        added = pages
        if before is not None and before.way == way and pages[: len(before.pages)] == before.pages:
            added = pages[len(before.pages) :]
        else:
            self.end(rows.key)
        self._open[rows.key] = _OpenSequence(rows.key, pages, tokens, now, way)
        for one in way:
            if one.room is not None:
                one.room.wanted.update(added)

    def end(self, key: int) -> None:
        """A sequence has ended."""
        if (before := self._open.pop(key, None)) is not None:
            for one in before.way:
                if one.room is not None:
                    one.room.wanted = one.room.wanted - Counter(before.pages)

    def make_room(
        self,
        one: HostedBlock,
        pages: Collection[int],
        copies: Sequence[HostedBlock],
        over: Iterable[SequencePages],
        now: float,
        redundant_alone: bool = False,
    ) -> bool:
        """Has an instance have room for pages; `copies` are all instances of its block, `over` the sequences
        that have ended. Tells whether there is room now."""
        if one.room is None or (needed := one.room.lacks(pages)) <= one.room.free:
            return True
        known: dict[int, SequencePages] = {own.key: own for own in (*over, *self._open.values())}
        references = Counter(page for own in known.values() for page in own.pages)
        found = [self._copy(own, at, references, now) for own in known.values() for at in copies]
        owners = {
            (own.key, str(at.block)): at.worker.address for own in self._open.values() for at in own.way
        }
        redundant = redundant_copies(found, owners, self._open)
        own_copies = [own for own in found if own.worker == one.worker.address]
        staying = sorted({*own_copies} - {*redundant}, key=lambda own: own.key)
        kept = {*pages, *(page for own in staying for page in known[own.key].pages)}
        leaving = [page for page in one.room.pages if page not in references]
        leaving += _pages(known, (own for own in redundant if own.worker == one.worker.address))
        leaving.sort(key=references.__getitem__)
        self.swept += _drop(one, leaving, kept, needed + one.room.size // _BEYOND)
        if not redundant_alone:
            self.swept += _drop(one, _pages(known, sweep_order(staying)), set(pages), needed)
        return needed <= one.room.free

    def _copy(self, own: SequencePages, at: HostedBlock, references: Counter[int], now: float) -> PagesCopy:
        shared = sum(references[page] > 1 for page in own.pages)
        tokens = held_tokens(at, own.pages, own.tokens, self._size)
        return PagesCopy(
            own.key, str(at.block), at.worker.address, tokens, 0, shared, resumes_at(own.at, now)
        )


@contextmanager
def holding(one: HostedBlock | None, pages: Sequence[int]) -> Iterator[None]:
    """Pages stay at an instance in the meantime."""
    room = None if one is None else one.room
    if room is not None:
        room.hold(pages)
    try:
        yield
    finally:
        if room is not None:
            room.release(pages)


def _pages(known: dict[int, SequencePages], copies: Iterable[PagesCopy]) -> list[int]:
    """The pages of copies, those of each from its end: what is left of it is a beginning."""
    return [page for own in copies for page in reversed(known[own.key].pages)]


def _drop(one: HostedBlock, pages: Iterable[int], kept: Collection[int], free: int) -> int:
    """Drops pages in their order until so many places are free; returns how many."""
    assert one.room is not None, "pages leave where there is too little room"
    before = one.room.free
    for page in pages:
        if one.room.free >= free:
            break
        if page not in kept and not one.room.is_held(page):
            one.drop([page])
    return one.room.free - before
