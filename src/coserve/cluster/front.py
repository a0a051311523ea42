"""The scheduler's side of a cluster: which worker has which block, who holds whose pages, and the way of rows.

Each block of a base has instances on one worker or several. A sequence's rows go to those that hold its pages;
where one lacks some, they are copied from another, recomputed from the front, or both until they meet
(BlockLLM, 5.1). Whatever is lost with a worker is loaded and computed again elsewhere: no request fails for it.

What an instance holds is counted page by page, with the tokens that are in each: a page whose bytes nobody has
confirmed is not read.
"""

import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from coserve.adapters.sites import Site
from coserve.cluster.blocks import decode_sites, encode_sites
from coserve.cluster.meeting import Meeting, MovingPages, PageMove
from coserve.cluster.messages import (
    BlockLoaded,
    CancelRows,
    CloseBlock,
    CopyPages,
    DropVersions,
    HoldAdapter,
    Hop,
    LoadBlock,
    PassRows,
    ReadFrozen,
    RowsFailed,
    RowsPassed,
    RowSegment,
    TellSites,
)
from coserve.cluster.records import ClusterLink
from coserve.cluster.remote import WorkerLink, error_in
from coserve.core.sequence import stage_spans
from coserve.errors import (
    ConfigError,
    CoserveError,
    ModelError,
    RequestError,
    Unreachable,
    WeightsUnreadable,
)

_log = logging.getLogger(__name__)
_BEAT: Final = 1.0  # seconds between signs of life, and between attempts to reach a worker
_AVOIDED: Final = 30.0  # seconds in which rows do not use a link that has failed
_ATTEMPTS: Final = 8  # of a pass while workers are lost; then the plan waits
_CHUNK: Final = 128  # tokens of a piece of pages that are brought
_RATE: Final = 1e8  # bytes a second of a link that nobody has measured, and
_RECOMPUTED: Final = 1e3  # tokens a second of recomputing
# A number with its outcome and tensors; None where a worker was lost.
Outcomes: TypeAlias = "queue.SimpleQueue[tuple[int, RowsPassed | RowsFailed | None, list[Tensor]]]"


class _Again(Exception):
    """A worker or a link was lost; what was under way has to be done again."""


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Rows of one sequence in a pass: `length` of them after `context` positions, whose keys and values are in
    `pages`. `embedded` gives the embeddings [count, width] of its tokens from a position on."""

    key: int
    length: int
    context: int
    pages: Sequence[int]
    adapter: str
    goes_on: bool
    embedded: Callable[[int, int], Tensor]


@dataclass(eq=False)
class HostedBlock:
    """An instance on a worker. `filled` has the pages that are clean there, with the tokens in each."""

    number: int
    block: int
    worker: WorkerLink
    loaded: BlockLoaded
    filled: dict[int, int] = field(default_factory=dict)
    rows: int = 0  # on their way there
    rate: float = 0.0  # rows a second, as last measured

    def lacking(self, pages: Sequence[int], tokens: int, page_size: int) -> list[int]:
        """Places in `pages` of those that lack some of so many tokens."""
        return [
            place
            for place in range(-(-tokens // page_size))
            if self.filled.get(pages[place], 0) < min(page_size, tokens - place * page_size)
        ]

    def note(self, pages: Sequence[int], tokens: int, page_size: int) -> None:
        """Notes that the pages hold so many tokens."""
        for place in range(-(-tokens // page_size)):
            there = min(page_size, tokens - place * page_size)
            self.filled[pages[place]] = max(self.filled.get(pages[place], 0), there)


class ChooseInstance(Protocol):
    """The dispatch of a sequence's rows to one of a block's instances."""

    def __call__(
        self, rows: SequenceRows, candidates: Sequence[HostedBlock], page_size: int
    ) -> HostedBlock: ...


def owner_first(rows: SequenceRows, candidates: Sequence[HostedBlock], page_size: int) -> HostedBlock:
    """The instance that lacks fewest of the sequence's pages; of several the one with fewest rows under way."""

    def cost(one: HostedBlock) -> tuple[int, int, int]:
        return len(one.lacking(rows.pages, rows.context, page_size)), one.rows, one.number

    return min(candidates, key=cost)


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How a base is cut into blocks: their number, the instances of each, and what an instance is told of its
    model and of its keys and values."""

    model: str
    files: str
    depth: int
    blocks: int
    copies: int
    dtype: str
    pages: int
    page_size: int
    sequences: int


@dataclass(eq=False)
class _Journey:
    """Rows of some sequences that go the same way: legs of instances that reach each other."""

    rows: Sequence[SequenceRows]
    places: Sequence[int]
    legs: list[Sequence[HostedBlock]]
    hidden: Tensor
    number: int = -1


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """What was sent to instances under one number, and where its outcome goes."""

    instances: Sequence[HostedBlock]
    outcome: Outcomes


class ClusterFront:
    """The cluster as one scheduler uses it. `addresses` gives those of its workers at any moment. One thread
    calls `run` and `clean`; any may call the rest."""

    def __init__(
        self,
        settings: BlockSettings,
        addresses: Callable[[], Collection[str]],
        key: bytes,
        choose: ChooseInstance = owner_first,
        moving: MovingPages = MovingPages.MEET,
    ) -> None:
        self.settings, self.choose, self.moving = settings, choose, moving
        self.contents: dict[int, str] = {}  # of each block, as its first instance told
        self.copied = self.recomputed = 0  # tokens of pages that were brought, over all blocks
        self._addresses, self._key, self._id = addresses, key, uuid.uuid4().hex
        self._numbers = itertools.count(1)  # of instances and passes
        self._lock = threading.Lock()  # of all below
        self._workers: dict[str, WorkerLink] = {}
        self._refused: dict[str, str] = {}  # workers that have another model, and why
        self._instances: dict[int, HostedBlock] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._avoided: dict[tuple[str, str], float] = {}  # links, and until when
        self._adapters: dict[str, bytes] = {}  # encoded, that instances hold
        self._sites = b""
        self._placing = threading.RLock()  # blocks are placed by one thread at a time
        self._is_closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="coserve-cluster", daemon=True)

    # Workers and their blocks

    def open(self) -> list[list[Site]]:
        """Connects the workers and loads every block; returns the blocks' sites. Raises ConfigError where there
        are no workers, and a worker's error."""
        self._connect()
        if not self._workers:
            told = "; ".join(self._refused.values()) or "none of their addresses answers"
            raise ConfigError(f"engine.cluster has no workers: {told}")
        first = self._place()
        self._beating.start()
        return [decode_sites(one.loaded.sites) for one in first]

    def tell_sites(self, sites: Mapping[str, Site]) -> None:
        """Tells all instances the sites of the whole model."""
        self._sites = encode_sites(sites)
        for one in self.instances():
            one.worker.ask(TellSites(one.number, self._sites), one.number, "sites")

    def close(self) -> None:
        """Ends all connections; the workers close this scheduler's instances."""
        self._is_closed.set()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.close()

    def instances(self, block: int | None = None) -> list[HostedBlock]:
        """Instances on workers that are there, of a block or of all."""
        with self._lock:
            return [
                one
                for one in self._instances.values()
                if one.worker.is_alive and (block is None or one.block == block)
            ]

    @property
    def max_positions(self) -> int:
        """Longest sequences that all blocks take."""
        return min(one.loaded.max_positions for one in self.instances())

    def status(self) -> dict[str, list[int]]:
        """Blocks by the addresses of workers that are there."""
        with self._lock:
            return {
                address: sorted(one.block for one in self._instances.values() if one.worker is worker)
                for address, worker in self._workers.items()
            }

    def _connect(self) -> None:
        """Connects the workers that are not connected."""
        for address in self._addresses():
            with self._lock:
                if address in self._workers:
                    continue
            try:
                link = WorkerLink(address, self._key, self._id, self._settle, self._lose)
            except (Unreachable, ConfigError) as error:
                if address not in self._refused:
                    _log.warning("%s", error)
                self._refused[address] = str(error)
                continue
            self._refused.pop(address, None)
            with self._lock:
                self._workers[address] = link
                if not link.is_alive:  # and told of it before it was here
                    del self._workers[address]

    def _beat(self) -> None:
        """Asks workers for signs of life, and looks for ones that have come, or come back."""
        while not self._is_closed.wait(_BEAT):
            with self._lock:
                workers = list(self._workers.values())
            for worker in workers:
                worker.check()
            self._connect()
            try:
                self._place()
            except CoserveError as error:
                _log.warning("blocks are not where they should be: %s", error)

    def _lose(self, worker: WorkerLink) -> None:
        """A worker has gone: its instances are, and what was under way there."""
        with self._lock:
            if self._workers.get(worker.address) is worker:
                del self._workers[worker.address]
            lost = [one for one in self._instances.values() if one.worker is worker]
            for one in lost:
                del self._instances[one.number]
            numbers = [
                number
                for number, own in self._under_way.items()
                if any(one.worker is worker for one in own.instances)
            ]
            outcomes = [(number, self._under_way.pop(number).outcome) for number in numbers]
        if not self._is_closed.is_set():
            _log.warning(
                "the worker at %s is gone: its blocks %s are loaded elsewhere, and its pages computed again",
                worker.address, sorted(one.block for one in lost),
            )  # fmt: skip
        for number, outcome in outcomes:
            outcome.put((number, None, []))

    def _place(self) -> list[HostedBlock]:
        """Gives every block as many instances as there are to be, on workers with the fewest blocks; returns
        one of each. Raises the error of a worker where a block has none at all, and WeightsUnreadable without
        any worker."""
        with self._placing:
            found = []
            for block in range(self.settings.blocks):
                error: CoserveError | None = None
                while len(there := self.instances(block)) < self.settings.copies:
                    if (worker := self._room_for(block, there)) is None:
                        break
                    try:
                        self._load(block, worker)
                    except (ModelError, ConfigError, Unreachable) as raised:
                        error = raised
                        _log.warning("%s", raised)
                        if isinstance(raised, Unreachable):
                            continue
                        with self._lock:  # its connection stays, so that it is not asked again
                            self._refused[worker.address] = str(raised)
                if not there:
                    raise error or WeightsUnreadable(
                        f"no worker of the cluster has block {block} of {self.settings.model}, or can load it"
                    )
                found.append(there[0])
            return found

    def _room_for(self, block: int, there: Sequence[HostedBlock]) -> WorkerLink | None:
        taken = {one.worker.address for one in there}
        with self._lock:
            counts = dict.fromkeys(self._workers, 0)
            for one in self._instances.values():
                if one.worker.address in counts:
                    counts[one.worker.address] += 1
            free = [a for a in self._workers if a not in taken and a not in self._refused]
            return self._workers[min(free, key=lambda a: (counts[a], a))] if free else None

    def _load(self, block: int, worker: WorkerLink) -> None:
        """Opens an instance. Raises the worker's error, and ModelError for another block than that of the
        first instance."""
        own, number = self.settings, next(self._numbers)
        span = stage_spans(own.depth, own.blocks)[block]
        asked = LoadBlock(
            number, own.model, own.files, span.first, span.last, own.dtype, own.pages, own.page_size, own.sequences
        )  # fmt: skip
        loaded = worker.load(asked)
        if self.contents.setdefault(block, loaded.content) != loaded.content:
            with suppress(Unreachable):
                worker.send(CloseBlock(number))
            raise ModelError(
                f"the worker at {worker.address} has another block {block} than the cluster, and is refused: "
                f"{loaded.content[:16]} instead of {self.contents[block][:16]}"
            )
        if self._sites:
            worker.ask(TellSites(number, self._sites), number, "sites")
        with self._lock:
            adapters = dict(self._adapters)
        for key, data in adapters.items():
            worker.ask(HoldAdapter(number, key, data), number, key)
        with self._lock:
            if worker.is_alive:
                self._instances[number] = HostedBlock(number, block, worker, loaded)
                for key in adapters.keys() - self._adapters.keys():
                    with suppress(Unreachable):
                        worker.send(DropVersions(number, (key,)))

    # Adapters

    def hold(self, key: str, adapter: bytes) -> None:
        """Has all instances hold an adapter version. Raises a worker's error, with nothing held."""
        with self._placing:
            with self._lock:
                self._adapters[key] = adapter
            try:
                for one in self.instances():
                    with suppress(Unreachable):  # whoever takes its place gets it
                        one.worker.ask(HoldAdapter(one.number, key, adapter), one.number, key)
            except CoserveError:
                self.drop([key])
                raise

    def drop(self, keys: Sequence[str]) -> None:
        """Has no instance hold these versions."""
        with self._lock:
            known = tuple(key for key in keys if self._adapters.pop(key, None) is not None)
        if known:
            for one in self.instances():
                with suppress(Unreachable):
                    one.worker.send(DropVersions(one.number, known))

    def read(self, layer: int, path: str, what: str) -> Tensor | None:
        """A frozen parameter in a layer's block. Raises a worker's error."""
        spans = stage_spans(self.settings.depth, self.settings.blocks)
        block = next(place for place, span in enumerate(spans) if span.first <= layer < span.last)
        for one in self.instances(block):
            with suppress(Unreachable):
                return one.worker.read(ReadFrozen(one.number, path, what))
        raise WeightsUnreadable(f"no worker of the cluster that has {path} can be reached")

    # Pages

    def clean(self, pages: Sequence[int]) -> None:
        """Pages have a new owner: nothing in them counts any more."""
        for one in self.instances():
            for page in pages:
                one.filled.pop(page, None)

    # Rows

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
        self, rows: Sequence[SequenceRows], hidden: Tensor, starts: Sequence[int], left: Sequence[int], out: Tensor
    ) -> list[int]:
        """Sends the rows that are left on their way, and waits for all. Returns those that were lost."""
        if any(not self.instances(block) for block in range(self.settings.blocks)):
            try:
                self._place()
            except CoserveError as error:
                raise WeightsUnreadable(str(error)) from error
        ways: dict[int, list[HostedBlock]] = {}
        for place in left:
            ways[place] = self._way(rows[place])
            self._bring(rows[place], ways[place])
        journeys = []
        for places in _grouped(ways, self.settings.blocks):
            own = torch.cat([hidden[starts[place] : starts[place + 1]] for place in places])
            journeys.append(_Journey([rows[p] for p in places], places, self._legs(ways[places[0]]), own))
        return self._travel(journeys, starts, out)

    def _way(self, rows: SequenceRows) -> list[HostedBlock]:
        """An instance of each block. Raises _Again where one has none."""
        way = []
        for block in range(self.settings.blocks):
            if not (candidates := self.instances(block)):
                raise _Again
            way.append(self.choose(rows, candidates, self.settings.page_size))
        return way

    def _legs(self, way: Sequence[HostedBlock]) -> list[Sequence[HostedBlock]]:
        """The way in parts whose workers reach each other: between two, rows come back here."""
        legs: list[list[HostedBlock]] = [[way[0]]]
        for before, one in itertools.pairwise(way):
            if self._is_avoided(before, one):
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
                error = self._failed(number, message, leg) or error
                continue
            (hidden,) = tensors
            for one, seconds in zip(leg, message.seconds, strict=True):
                self._note(one, journey.rows)
                one.rate = len(hidden) / max(seconds, 1e-9)
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
        journey.number = self._start(leg, outcome)
        going[journey.number] = journey
        self._count(leg, journey.hidden, 1)
        hops = tuple(self._hop(one, [page for own in segments for page in own.pages]) for one in leg)
        message = PassRows(journey.number, self._id, segments, hops)
        with suppress(Unreachable):  # told as an outcome
            leg[0].worker.send(message, [journey.hidden])

    def _start(
        self,
        instances: Sequence[HostedBlock],
        outcome: Outcomes,
    ) -> int:
        """A new number, whose outcome goes to a queue, at once where a worker is gone."""
        number = next(self._numbers)
        with self._lock:
            is_lost = any(not one.worker.is_alive for one in instances)
            if not is_lost:
                self._under_way[number] = _UnderWay(instances, outcome)
        if is_lost:
            outcome.put((number, None, []))
        return number

    def _settle(self, number: int, message: RowsPassed | RowsFailed, tensors: list[Tensor]) -> None:
        """The outcome of what was under way; one that comes late is nobody's."""
        with self._lock:
            found = self._under_way.pop(number, None)
        if found is not None:
            found.outcome.put((number, message, tensors))

    def _failed(
        self, number: int, message: RowsFailed | None, instances: Sequence[HostedBlock]
    ) -> CoserveError | None:
        """Notes why something did not come back. Returns the error where it is nobody's going away."""
        for worker in {one.worker for one in self.instances()}:
            with suppress(Unreachable):
                worker.send(CancelRows((number,)))
        for one in instances:  # pages that were to be cleaned may not be
            one.filled = {page: count for page, count in one.filled.items() if count}
        if message is None:
            return None
        if message.unreached:
            pairs = itertools.pairwise(one.worker.address for one in instances)
            avoided = [pair for pair in pairs if pair[1] == message.unreached]
            _log.warning("%s; its rows go by the scheduler", message.text)
            with self._lock:
                self._avoided |= dict.fromkeys(avoided, time.monotonic() + _AVOIDED)
            return None
        error = error_in(message)
        if type(error) is RequestError and "has no instance" in message.text:
            with self._lock:
                for one in instances:
                    self._instances.pop(one.number, None)
            return None
        return error

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

    # Pages that an instance lacks

    def _bring(self, rows: SequenceRows, way: Sequence[HostedBlock]) -> None:
        """Brings the pages of a sequence's context to the instances on its way, from the first block on. Raises
        _Again where a worker is lost meanwhile, and a worker's error."""
        size = self.settings.page_size
        for block, one in enumerate(way):
            if lacking := one.lacking(rows.pages, rows.context, size):
                self._move(rows, way[: block + 1], lacking)

    def _move(self, rows: SequenceRows, way: Sequence[HostedBlock], lacking: Sequence[int]) -> None:
        """Recomputes pages from the first that is lacking on, while they are copied from the last one back."""
        one, size = way[-1], self.settings.page_size
        first = lacking[0] * size
        source = self._source(rows, one, lacking)
        nbytes = one.loaded.page_nbytes / size
        move = PageMove(
            tokens=rows.context - first,
            token_nbytes=max(int(nbytes), 1),
            page=size,
            link=None if source is None else ClusterLink(_RATE),
            recompute_rate=one.rate or _RECOMPUTED,
        )
        meeting = Meeting(move, max(_CHUNK, size), MovingPages.RECOMPUTE if source is None else self.moving)
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
                    with self._lock:
                        self._under_way.pop(other, None)
                    self._failed(other, None, way)
                if error := self._failed(number, message, [source, one] if is_copy and source else way):
                    raise error
                raise _Again
            seconds = time.monotonic() - began
            self._brought(rows, one, first, tokens)
            if is_copy:
                meeting.copied(seconds)
            else:
                for other in way[:-1]:
                    self._brought(rows, other, first, tokens)
                meeting.recomputed(seconds)
        self.copied += meeting.copied_tokens
        self.recomputed += meeting.recomputed_tokens

    def _source(self, rows: SequenceRows, one: HostedBlock, lacking: Sequence[int]) -> HostedBlock | None:
        """Another instance of the block that has all that this one lacks."""
        for other in self.instances(one.block):
            if other is one or self._is_avoided(other, one):
                continue
            if set(lacking).isdisjoint(other.lacking(rows.pages, rows.context, self.settings.page_size)):
                return other
        return None

    def _is_avoided(self, sender: HostedBlock, receiver: HostedBlock) -> bool:
        """Tells whether the link between two workers has failed a while ago."""
        with self._lock:
            until = self._avoided.get((sender.worker.address, receiver.worker.address), 0.0)
        return until > time.monotonic()

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
        number = self._start(way, outcome)
        pages = tuple(rows.pages[: -(-tokens.stop // self.settings.page_size)])
        segment = RowSegment(rows.key, len(tokens), tokens.start, pages, rows.adapter)
        hops = tuple(self._hop(one, pages) for one in way)
        hidden = rows.embedded(tokens.start, len(tokens))
        with suppress(Unreachable):
            way[0].worker.send(PassRows(number, self._id, (segment,), hops), [hidden])
        return number

    def _copy(
        self,
        source: HostedBlock,
        target: HostedBlock,
        pages: tuple[int, ...],
        outcome: Outcomes,
    ) -> int:
        number = self._start([source, target], outcome)
        hop = Hop(target.worker.address, target.number)
        with suppress(Unreachable):
            source.worker.send(CopyPages(number, self._id, source.number, pages, hop))
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
