"""The scheduler's choice of an instance for a sequence's rows, from its live record of the cluster."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final, Protocol

from coserve.cluster.dispatch import SCHEDULER, Dispatch, DispatchSettings
from coserve.cluster.hosted import HostedBlock, SequenceRows
from coserve.cluster.records import (
    BlockInstance,
    ChainRequest,
    ClusterBlock,
    ClusterLink,
    ClusterView,
    ClusterWorker,
    ComputeProfile,
)
from coserve.cluster.remote import WorkerLink
from coserve.core.ranges import MOST_COUNT
from coserve.split.address import Address

_LOCAL: Final = 2e9  # bytes a second on one host before any are measured
_REMOTE: Final = 1e8  # and between two, as 1 Gbit/s gives
_GUESS: Final = 1e-3  # seconds of a pass that nobody has measured
_CONTENT: Final = "block"


class ChooseInstance(Protocol):
    """The choice of one of a block's instances, of which there are several, for rows that are at the instance
    `before`; `planned` are rows that the same pass sends to instances, by their numbers."""

    def __call__(
        self,
        rows: SequenceRows,
        before: HostedBlock | None,
        candidates: Sequence[HostedBlock],
        planned: Mapping[int, int],
        page_size: int,
    ) -> HostedBlock: ...


class LiveDispatch:
    """The estimate of `cluster/dispatch.py` with what this scheduler knows: seconds of passes, and links as
    messages over them have shown. A row has `row_nbytes` between two blocks."""

    def __init__(self, row_nbytes: int) -> None:
        self._row_nbytes = row_nbytes

    def __call__(
        self,
        rows: SequenceRows,
        before: HostedBlock | None,
        candidates: Sequence[HostedBlock],
        planned: Mapping[int, int],
        page_size: int,
    ) -> HostedBlock:
        """See `ChooseInstance`."""
        named = {one.worker.address: one for one in candidates}
        token_nbytes = max(candidates[0].loaded.page_nbytes // page_size, 1)
        held = {
            name: held_tokens(one, rows.pages, rows.context, page_size)
            for name, one in named.items()
            if rows.context
        }
        now, workers = time.monotonic(), {name: one.worker for name, one in named.items()}
        links = {(SCHEDULER, name): live_link(None, one, now) for name, one in workers.items()}
        if before is not None:
            workers[before.worker.address] = before.worker
        profile = measured_profile(candidates)
        block = ClusterBlock(_CONTENT, 0, token_nbytes, self._row_nbytes, profile)
        view = ClusterView(
            {name: _with_room(live_worker(name, one), one) for name, one in named.items()},
            {_CONTENT: block},
            tuple(_instance(name, one, planned) for name, one in named.items()),
            links | live_links(workers.values(), now),
        )
        request = ChainRequest(rows.key, rows.context, rows.length, {_CONTENT: held})
        sender = SCHEDULER if before is None else before.worker.address
        found = Dispatch(DispatchSettings(page=page_size)).choose(view, request, _CONTENT, sender)
        return max(candidates, key=_unwanted) if found is None else named[found.worker]


def live_links(workers: Iterable[WorkerLink], now: float) -> dict[tuple[str, str], ClusterLink]:
    """Links between some workers, in both directions."""
    pairs = permutations(workers, 2)
    return {(one.address, other.address): live_link(one, other, now) for one, other in pairs}


def live_link(sender: WorkerLink | None, receiver: WorkerLink, now: float) -> ClusterLink:
    """The link from a worker, or from this scheduler, to a worker: as measured, or guessed from where they
    are."""
    if sender is None:
        known, is_local = receiver.timer.measured, False
    else:
        known = sender.links.get(receiver.address)
        is_local = Address.parse(sender.address).host == Address.parse(receiver.address).host
    guess = ClusterLink(_LOCAL if is_local else _REMOTE)
    return guess if known is None else known.faded(guess, now)


def held_tokens(one: HostedBlock, pages: Sequence[int], tokens: int, page_size: int) -> int:
    """Of so many tokens in `pages`, those from the front on that an instance has."""
    lacking = one.lacking(pages, tokens, page_size)
    return min(lacking[0] * page_size, tokens) if lacking else tokens


def live_worker(name: str, one: HostedBlock) -> ClusterWorker:
    """A worker. Its instances' pages are allocated as they are opened, so its memory decides nothing."""
    return ClusterWorker(name, Address.parse(name).host, MOST_COUNT, 0, 1.0, 1.0, one.rate or 1 / _GUESS)


def _unwanted(one: HostedBlock) -> int:
    """Pages that open sequences could get without others of them losing some."""
    return MOST_COUNT if one.room is None else one.room.size - len(one.room.wanted)


def _with_room(worker: ClusterWorker, one: HostedBlock) -> ClusterWorker:
    """A worker with the memory of an instance that has fewer pages than its scheduler: those that open
    sequences have there are taken, others leave where room is needed."""
    if one.room is None:
        return worker
    nbytes = one.loaded.page_nbytes
    return replace(worker, memory=one.room.size * nbytes, used=len(one.room.wanted) * nbytes)


def measured_profile(candidates: Sequence[HostedBlock]) -> ComputeProfile:
    """The block's seconds by rows, as its instances have taken them on average; growing, as passes of few
    rows may be slow at times."""
    sizes = sorted({size for one in candidates for size in one.seconds})
    points, least = list[tuple[int, float]](), 0.0
    for size in sizes:
        own = [one.seconds[size] for one in candidates if size in one.seconds]
        least = max(least, sum(own) / len(own))
        points.append((size, least))
    return ComputeProfile(tuple(points or [(1, _GUESS)]))


def _instance(name: str, one: HostedBlock, planned: Mapping[int, int]) -> BlockInstance:
    rows = one.rows + planned.get(one.number, 0)
    return BlockInstance(name, _CONTENT, (rows,) if rows else (), most_queued=MOST_COUNT)
