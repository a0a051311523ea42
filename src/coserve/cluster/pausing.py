"""Sequences that have ended, whose pages wait for another turn of their conversation: which of them move to a
worker where that turn would go to (`coordination.py`), by the scheduler's live record."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from coserve.cluster.choosing import held_tokens, live_links, live_worker, measured_profile
from coserve.cluster.coordination import PausedPages, proactive_moves
from coserve.cluster.dispatch import Dispatch, DispatchRule, DispatchSettings
from coserve.cluster.hosted import HostedBlock, SequencePages
from coserve.cluster.records import BlockInstance, ChainRequest, ClusterBlock, ClusterView
from coserve.core.ranges import MOST_COUNT

_MOST: Final = 256  # sequences that are remembered; the oldest is forgotten first
_LOOK: Final = 1.0  # seconds between two looks


class PausedSequences:
    """Ended sequences whose pages nobody else has got, by key, with their whole pages."""

    def __init__(self, page_size: int) -> None:
        self._size, self._looked = page_size, 0.0
        self._paused: dict[int, SequencePages] = {}

    @property
    def known(self) -> Iterable[SequencePages]:
        """The sequences that are remembered, the one that ended first before the others."""
        return self._paused.values()

    def end(self, key: int, pages: Sequence[int], tokens: int, now: float) -> None:
        """A sequence has ended, whose pages may be read again."""
        if whole := tokens // self._size:
            self._paused[key] = SequencePages(key, tuple(pages[:whole]), whole * self._size, now)
        while len(self._paused) > _MOST:
            del self._paused[next(iter(self._paused))]

    def forget(self, pages: Iterable[int]) -> None:
        """Pages have a new owner, or are read again: their sequences wait no longer."""
        if self._paused:
            gone = set(pages)
            self._paused = {key: one for key, one in self._paused.items() if gone.isdisjoint(one.pages)}

    def due(self, instances: Sequence[HostedBlock], now: float) -> list[tuple[SequencePages, HostedBlock]]:
        """Sequences whose pages of a block go to an instance now, if it is time to look. Pages are copied:
        computing them anew would take the time of rows that are there."""
        if not self._paused or now - self._looked < _LOOK:
            return []
        self._looked = now
        by_block: dict[str, dict[str, HostedBlock]] = {}
        for one in instances:
            by_block.setdefault(str(one.block), {})[one.worker.address] = one
        several = {content: own for content, own in by_block.items() if len(own) > 1}
        if not several:
            return []
        workers = {one.worker.address: one for one in instances}
        view = ClusterView(
            {address: live_worker(address, one) for address, one in workers.items()},
            {
                content: ClusterBlock(
                    content,
                    0,
                    max(next(iter(own.values())).loaded.page_nbytes // self._size, 1),
                    1,
                    measured_profile([*own.values()]),
                )
                for content, own in by_block.items()
            },
            tuple(_instance(one) for one in instances),
            live_links((one.worker for one in workers.values()), now),
        )
        readers: dict[int, int] = {}
        for paused in self._paused.values():
            for page in paused.pages:
                readers[page] = readers.get(page, 0) + 1
        waiting = [
            PausedPages(self._request(one, several), sum(readers[page] > 1 for page in one.pages), one.at)
            for one in self._paused.values()
        ]
        rules = DispatchSettings(page=self._size, rule=DispatchRule.COPY_ONLY, loads=False)
        moves = proactive_moves(view, waiting, now, Dispatch(rules))
        return [(self._paused[one.key], several[one.content][one.estimate.worker]) for one in moves]

    def _request(self, one: SequencePages, blocks: Mapping[str, Mapping[str, HostedBlock]]) -> ChainRequest:
        pages = {
            content: {
                address: held_tokens(instance, one.pages, one.tokens, self._size)
                for address, instance in own.items()
            }
            for content, own in blocks.items()
        }
        return ChainRequest(one.key, one.tokens, 1, pages)


def _instance(one: HostedBlock) -> BlockInstance:
    queue = (one.rows,) if one.rows else ()
    return BlockInstance(one.worker.address, str(one.block), queue, most_queued=MOST_COUNT)
