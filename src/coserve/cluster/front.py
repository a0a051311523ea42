"""The way of a pass's rows through the blocks of a cluster.

A sequence's rows go to the instances that dispatch chooses, owners of its pages first (BlockLLM, 5.3). Where
one lacks pages, they are copied from another, recomputed from the front, or both until they meet (5.1).
Whatever is lost with a worker is loaded and computed again elsewhere: no request fails for it.

What an instance holds is counted page by page, with the tokens that are in each: a page whose bytes nobody
has confirmed is not read.
"""

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from coserve.cluster.choosing import ChooseInstance, LiveDispatch, link_rate
from coserve.cluster.fleet import ClusterFleet
from coserve.cluster.hosted import HostedBlock, Outcomes, SequenceRows
from coserve.cluster.meeting import Meeting, MovingPages, PageMove
from coserve.cluster.messages import CopyPages, Hop, PassRows, RowSegment, RowsPassed
from coserve.cluster.records import ClusterLink
from coserve.errors import CoserveError, Unreachable, WeightsUnreadable

_ATTEMPTS: Final = 8  # of a pass while workers are lost; then the plan waits
_COPIED: Final = 128  # tokens of pages that are copied at once
_COMPUTED: Final = 512  # and computed again at a known rate: smaller passes read the weights more often
_RECOMPUTED: Final = 1e3  # tokens a second of recomputing before any are measured


class _Again(Exception):
    """A worker or a link was lost; what was under way has to be done again."""


@dataclass(eq=False)
class _Journey:
    """Rows of some sequences that go the same way: legs of instances that reach each other."""

    rows: Sequence[SequenceRows]
    places: Sequence[int]
    legs: list[Sequence[HostedBlock]]
    hidden: Tensor
    number: int = -1


class ClusterFront:
    """Takes rows through the blocks of a `fleet`. One thread calls it."""

    def __init__(
        self,
        fleet: ClusterFleet,
        choose: ChooseInstance | None = None,
        moving: MovingPages = MovingPages.MEET,
    ) -> None:
        self.fleet, self.moving, self.settings = fleet, moving, fleet.settings
        self.rates = fleet.rates
        self.choose: ChooseInstance = LiveDispatch(self.rates) if choose is None else choose
        self.copied = self.recomputed = 0  # tokens of pages that were brought, over all blocks

    def clean(self, pages: Sequence[int]) -> None:
        """Pages have a new owner: nothing in them counts any more."""
        for one in self.fleet.instances():
            for page in pages:
                one.filled.pop(page, None)

    def run(self, rows: Sequence[SequenceRows], hidden: Tensor) -> Tensor:
        """Takes rows [rows, width] of some sequences, one behind the other, through all blocks. Raises
        WeightsUnreadable while blocks are missing, and the error of a worker that computes and fails."""
        starts = [0, *itertools.accumulate(one.length for one in rows)]
        out = torch.empty_like(hidden)
        left = list(range(len(rows)))
        for _ in range(_ATTEMPTS):
            try:
                left = self._attempt(rows, hidden, starts, left, out)
            except _Again:
                continue
            if not left:
                return out
        raise WeightsUnreadable("workers of the cluster go away faster than their blocks are loaded again")

    def _attempt(
        self,
        rows: Sequence[SequenceRows],
        hidden: Tensor,
        starts: Sequence[int],
        left: Sequence[int],
        out: Tensor,
    ) -> list[int]:
        """Sends the rows that are left on their way, and waits for all. Returns those that were lost."""
        if any(not self.fleet.instances(block) for block in range(self.settings.blocks)):
            try:
                self.fleet.place()
            except CoserveError as error:
                raise WeightsUnreadable(str(error)) from error
        ways: dict[int, list[HostedBlock]] = {}
        planned: dict[int, int] = {}  # rows that are to go to instances
        for place in left:
            ways[place] = self._way(rows[place], planned)
            self._bring(rows[place], ways[place])
        journeys = []
        for places in _grouped(ways, self.settings.blocks):
            own = torch.cat([hidden[starts[place] : starts[place + 1]] for place in places])
            journeys.append(_Journey([rows[p] for p in places], places, self._legs(ways[places[0]]), own))
        return self._travel(journeys, starts, out)

    def _way(self, rows: SequenceRows, planned: dict[int, int]) -> list[HostedBlock]:
        """An instance of each block. Raises _Again where one has none."""
        way: list[HostedBlock] = []
        there = self.fleet.instances()
        for block in range(self.settings.blocks):
            candidates = [one for one in there if one.block == block]
            if not candidates:
                raise _Again
            chosen = candidates[0]
            if len(candidates) > 1:
                before = way[-1] if way else None
                chosen = self.choose(rows, before, candidates, planned, self.settings.page_size)
            planned[chosen.number] = planned.get(chosen.number, 0) + rows.length
            way.append(chosen)
        return way

    def _legs(self, way: Sequence[HostedBlock]) -> list[Sequence[HostedBlock]]:
        """The way in parts whose workers reach each other: between two, rows come back here."""
        legs: list[list[HostedBlock]] = [[way[0]]]
        for before, one in itertools.pairwise(way):
            if self.fleet.is_avoided(before, one):
                legs.append([one])
            else:
                legs[-1].append(one)
        return list(legs)

    def _travel(self, journeys: Sequence[_Journey], starts: Sequence[int], out: Tensor) -> list[int]:
        outcome: Outcomes = queue.SimpleQueue()
        going: dict[int, _Journey] = {}
        lost, error = list[int](), None
        for journey in journeys:
            self._send(journey, outcome, going)
        while going:
            number, message, tensors = outcome.get()
            journey = going.pop(number)
            leg = journey.legs.pop(0)
            self._count(leg, journey.hidden, -1)
            if not isinstance(message, RowsPassed):
                lost += journey.places
                error = self.fleet.failed(number, message, leg) or error
                continue
            (hidden,) = tensors
            for one, seconds in zip(leg, message.seconds, strict=True):
                self._note(one, journey.rows)
                one.observe(len(hidden), seconds)
            journey.hidden = hidden
            if journey.legs:
                self._send(journey, outcome, going)
                continue
            at = 0
            for place, own in zip(journey.places, journey.rows, strict=True):
                out[starts[place] : starts[place + 1]] = hidden[at : at + own.length]
                at += own.length
        if error is not None:
            raise error
        return sorted(lost)

    def _send(
        self,
        journey: _Journey,
        outcome: Outcomes,
        going: dict[int, _Journey],
    ) -> None:
        """Sends rows on the first of their legs."""
        leg = journey.legs[0]
        segments = tuple(self._segment(one) for one in journey.rows)
        journey.number = self.fleet.start(leg, outcome)
        going[journey.number] = journey
        self._count(leg, journey.hidden, 1)
        hops = tuple(self._hop(one, [page for own in segments for page in own.pages]) for one in leg)
        message = PassRows(journey.number, self.fleet.id, segments, hops)
        with suppress(Unreachable):  # told as an outcome
            leg[0].worker.send(message, [journey.hidden])

    def _segment(self, rows: SequenceRows) -> RowSegment:
        end = rows.context + rows.length
        pages = tuple(rows.pages[: -(-end // self.settings.page_size)])
        return RowSegment(rows.key, rows.length, rows.context, pages, rows.adapter, rows.goes_on)

    def _hop(self, one: HostedBlock, pages: Sequence[int]) -> Hop:
        """A hop to an instance, which cleans those of the pages first that were nobody's there."""
        fresh = tuple(dict.fromkeys(page for page in pages if page not in one.filled))
        one.filled |= dict.fromkeys(fresh, 0)
        return Hop(one.worker.address, one.number, fresh)

    def _note(self, one: HostedBlock, rows: Sequence[SequenceRows]) -> None:
        for own in rows:
            one.note(own.pages, own.context + own.length, self.settings.page_size)

    def _count(self, instances: Sequence[HostedBlock], hidden: Tensor, sign: int) -> None:
        for one in instances:
            one.rows += sign * len(hidden)

    def _bring(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> None:
        """Brings the pages of a sequence's context to the instances on its way, from the first block on.
        Raises _Again where a worker is lost meanwhile, and a worker's error."""
        size = self.settings.page_size
        for block, one in enumerate(way):
            if lacking := one.lacking(rows.pages, rows.context, size):
                self._move(rows, way[: block + 1], lacking)

    def _move(self, rows: SequenceRows, way: Sequence[HostedBlock], lacking: Sequence[int]) -> None:
        """Recomputes pages from the first that is lacking on, while they are copied from the last back."""
        one, size = way[-1], self.settings.page_size
        first = lacking[0] * size
        source = self._source(rows, one, lacking)
        nbytes = one.loaded.page_nbytes / size
        rate, is_known = self._recompute_rate(one)
        move = PageMove(
            tokens=rows.context - first,
            token_nbytes=max(int(nbytes), 1),
            page=size,
            link=None
            if source is None
            else ClusterLink(link_rate(source.worker.address, one.worker.address, self.rates)),
            recompute_rate=rate,
        )
        moving = MovingPages.RECOMPUTE if source is None else self.moving
        meeting = Meeting(move, max(_COPIED, size), moving, _COMPUTED if is_known else None)
        outcome: Outcomes = queue.SimpleQueue()
        going: dict[int, tuple[range, float, bool]] = {}
        while not meeting.is_done:
            if (tokens := meeting.next_recomputed()) is not None:
                number = self._recompute(rows, way, range(first + tokens.start, first + tokens.stop), outcome)
                going[number] = tokens, time.monotonic(), False
            if source is not None and (tokens := meeting.next_copied()) is not None:
                pages = self._pages_of(rows, first, tokens)
                number = self._copy(source, one, pages, outcome)
                going[number] = tokens, time.monotonic(), True
            number, message, _ = outcome.get()
            tokens, began, is_copy = going.pop(number)
            if not isinstance(message, RowsPassed):
                for other in going:  # late ones are nobody's
                    self.fleet.failed(other, None, way)
                if error := self.fleet.failed(number, message, [source, one] if is_copy and source else way):
                    raise error
                raise _Again
            seconds = time.monotonic() - began
            if is_copy:
                self._brought(rows, one, first, tokens)
                meeting.copied(seconds)
            else:
                for earlier, spent in zip(way, message.seconds, strict=True):
                    earlier.observe(len(tokens), spent)
                    self._brought(rows, earlier, first, tokens)
                meeting.recomputed(seconds)
        recomputed, copied = meeting.done
        self.recomputed, self.copied = self.recomputed + len(recomputed), self.copied + len(copied)
        if source is not None and copied:
            self.rates[source.worker.address, one.worker.address] = meeting.copy_rate * nbytes

    def _recompute_rate(self, one: HostedBlock) -> tuple[float, bool]:
        """Tokens a second that an instance computes again, and whether passes of many rows have shown that:
        its own, or else those of others of its block. What passes of few rows show is too little."""
        known = (one, *self.fleet.instances(one.block))
        shown = next((each.rate for each in known if max(each.seconds, default=0) >= _COPIED), 0.0)
        return shown or max(each.rate for each in known) or _RECOMPUTED, shown > 0.0

    def _source(self, rows: SequenceRows, one: HostedBlock, lacking: Sequence[int]) -> HostedBlock | None:
        """Another instance of the block that has all that this one lacks."""
        for other in self.fleet.instances(one.block):
            if other is one or self.fleet.is_avoided(other, one):
                continue
            if set(lacking).isdisjoint(other.lacking(rows.pages, rows.context, self.settings.page_size)):
                return other
        return None

    def _pages_of(self, rows: SequenceRows, first: int, tokens: range) -> tuple[int, ...]:
        size = self.settings.page_size
        return tuple(rows.pages[(first + tokens.start) // size : -(-(first + tokens.stop) // size)])

    def _brought(self, rows: SequenceRows, one: HostedBlock, first: int, tokens: range) -> None:
        size = self.settings.page_size
        for place in range((first + tokens.start) // size, -(-(first + tokens.stop) // size)):
            there = min(size, first + tokens.stop - place * size)
            one.filled[rows.pages[place]] = max(one.filled.get(rows.pages[place], 0), there)

    def _recompute(
        self,
        rows: SequenceRows,
        way: Sequence[HostedBlock],
        tokens: range,
        outcome: Outcomes,
    ) -> int:
        number = self.fleet.start(way, outcome)
        pages = tuple(rows.pages[: -(-tokens.stop // self.settings.page_size)])
        segment = RowSegment(rows.key, len(tokens), tokens.start, pages, rows.adapter)
        hops = tuple(self._hop(one, pages) for one in way)
        hidden = rows.embedded(tokens.start, len(tokens))
        with suppress(Unreachable):
            way[0].worker.send(PassRows(number, self.fleet.id, (segment,), hops), [hidden])
        return number

    def _copy(
        self,
        source: HostedBlock,
        target: HostedBlock,
        pages: tuple[int, ...],
        outcome: Outcomes,
    ) -> int:
        number = self.fleet.start([source, target], outcome)
        hop = Hop(target.worker.address, target.number)
        with suppress(Unreachable):
            source.worker.send(CopyPages(number, self.fleet.id, source.number, pages, hop))
        return number


def _grouped(ways: Mapping[int, Sequence[HostedBlock]], pieces: int) -> list[list[int]]:
    """Places of rows that go the same way, in up to so many groups each: workers compute one while another is
    on its way."""
    same: dict[tuple[int, ...], list[int]] = {}
    for place, way in ways.items():
        same.setdefault(tuple(one.number for one in way), []).append(place)
    found = []
    for places in same.values():
        count = min(pieces, len(places))
        found += [places[piece::count] for piece in range(count)]
    return found
