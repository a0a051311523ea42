"""The workers of a cluster as one scheduler has them: connections, the blocks that each has, and adapters.

Whoever is lost takes its instances along, and what was under way there; another worker loads the blocks. One
that comes back begins without any, and one with other blocks than the cluster's is refused.
"""

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from msgspec import structs
from torch import Tensor

from coserve.adapters.sites import Site
from coserve.cluster.blocks import decode_sites, encode_sites
from coserve.cluster.growing import due_changes, due_moves
from coserve.cluster.hosted import BlockSettings, HostedBlock, Outcome, Outcomes
from coserve.cluster.messages import (
    CancelRows,
    CloseBlock,
    DropVersions,
    HoldAdapter,
    ReadFrozen,
    RowsFailed,
    RowsPassed,
    RowsReturned,
    TellSites,
)
from coserve.cluster.placement import DependenceCounter
from coserve.cluster.remote import WorkerLink, error_in
from coserve.cluster.room import PageRoom
from coserve.cluster.scaling import DropInstance
from coserve.errors import (
    ConfigError,
    CoserveError,
    ModelError,
    RequestError,
    Unreachable,
    WeightsUnreadable,
)
from coserve.split.address import Address

_log = logging.getLogger(__name__)
_LOOK: Final = 10.0  # seconds between two looks at where blocks are
_BEAT: Final = 1.0  # seconds between signs of life, and between attempts to reach a worker
_MOST_TOLD: Final = 64  # workers
_AVOIDED: Final = 30.0  # seconds in which rows do not use a link that has failed


@dataclass(frozen=True, eq=False)
class _SentNumber:
    """Rows or pages that were sent to instances under one number, and where its outcome goes."""

    instances: Sequence[HostedBlock]
    outcome: Outcomes


class ClusterFleet:
    """The workers and their instances. `addresses` gives the workers' at any moment. Any thread may call."""

    def __init__(self, settings: BlockSettings, addresses: Callable[[], Collection[str]], key: bytes) -> None:
        self.settings, self.id = settings, uuid.uuid4().hex
        self.contents: dict[int, str] = {}  # of each block, as its first instance told
        self._traffic = DependenceCounter()
        self._computed: dict[str, float] = {}  # seconds of each block since the last look
        self._looked = time.monotonic()
        self._addresses, self._key = addresses, key
        self._numbers = itertools.count(1)  # of instances and passes
        self._lock = threading.Lock()  # of all below, and of traffic and seconds
        self._workers: dict[str, WorkerLink] = {}
        self._refused: dict[str, str] = {}  # workers that have another model, and why
        self._instances: dict[int, HostedBlock] = {}
        self._under_way: dict[int, _SentNumber] = {}
        self._avoided: dict[tuple[str, str], float] = {}  # links, and until when
        self._unfit: set[tuple[int, str]] = set()  # blocks and workers that could not load them too
        self._adapters: dict[str, bytes] = {}  # encoded, that instances hold
        self._sites = b""
        self._placing = threading.RLock()  # blocks are placed by one thread at a time
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"coserve-cluster-{name}", daemon=True)
            for name, work in (("beat", self._beat), ("place", self._keep_placed))
        ]

    def open(self) -> list[list[Site]]:
        """Connects the workers and loads every block; returns the blocks' sites. Raises ConfigError where
        there are no workers, and a worker's error."""
        self._connect()
        if not self._workers:
            told = "; ".join(self._refused.values()) or "none of their addresses answers"
            raise ConfigError(f"engine.cluster has no workers: {told}")
        first = self.place()
        for thread in self._threads:
            thread.start()
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

    @property
    def has_states(self) -> bool:
        """Tells whether some blocks have recurrent layers."""
        return any(one.loaded.state_nbytes for one in self.instances())

    def status(self) -> dict[str, list[int]]:
        """Blocks by the addresses of workers that are there."""
        with self._lock:
            return {
                address: sorted(one.block for one in self._instances.values() if one.worker is worker)
                for address, worker in self._workers.items()
            }

    def told(self) -> list[str]:
        """The state of each worker, in words; where they are is not told."""
        there = self.status()
        with self._lock:
            refused = set(self._refused)
        told = []
        for address, blocks in there.items():
            without = "refused to load blocks" if address in refused else "no blocks"
            told.append(f"blocks {', '.join(map(str, blocks))}" if blocks else without)
        return [*told, *("cannot be reached" for _ in refused - set(there))][:_MOST_TOLD]

    def _connect(self) -> None:
        """Connects the workers that are not connected."""
        for address in self._addresses():
            with self._lock:
                if address in self._workers:
                    continue
            try:
                link = WorkerLink(address, self._key, self.id, self._settle, self._lose)
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
        """Asks workers for signs of life. It does nothing else: `check` counts from its own questions, and a
        block that loads for long, or an address that does not answer, would make all workers look dead."""
        while not self._is_closed.wait(_BEAT):
            with self._lock:
                workers = list(self._workers.values())
            for worker in workers:
                worker.check()

    def _keep_placed(self) -> None:
        """Looks for workers that have come, or come back, and has every block be on as many as there are to
        be."""
        while not self._is_closed.wait(_BEAT):
            self._connect()
            try:
                self.place()
                if self.settings.queue:
                    self._scale()
                if time.monotonic() - self._looked >= _LOOK:
                    self._replace()
            except CoserveError as error:
                _log.warning("blocks are not where they should be: %s", error)

    def _lose(self, worker: WorkerLink) -> None:
        """A worker has gone: its instances are, and what was under way there."""
        with self._lock:
            if self._workers.get(worker.address) is worker:
                del self._workers[worker.address]
            self._unfit = {one for one in self._unfit if one[1] != worker.address}
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
            outcome.put(Outcome(number))

    def place(self) -> list[HostedBlock]:
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
                        f"no worker of the cluster has block {block} of {self.settings.load.model}, or can "
                        "load it"
                    )
                found.append(there[0])
            return found

    def _scale(self) -> None:
        """Adds instances of blocks whose queues are long, and takes those away that have been idle. Pages
        stay where they are: those that a new instance lacks come when rows do."""
        with self._placing:
            with self._lock:
                workers = {a: one for a, one in self._workers.items() if a not in self._refused}
            there = self.instances()
            for change in due_changes(self.settings, there, workers, time.monotonic()):
                block, worker = int(change.content), workers[change.worker]
                if isinstance(change, DropInstance):
                    _log.info("block %d leaves the worker at %s: it had no work", block, worker.address)
                    self._close(next(o for o in there if o.block == block and o.worker is worker))
                elif (block, worker.address) not in self._unfit:
                    _log.info("block %d comes to the worker at %s too", block, worker.address)
                    try:
                        self._load(block, worker)
                    except CoserveError as error:
                        _log.warning("%s", error)
                        self._unfit.add((block, worker.address))

    def count(self, instances: Sequence[HostedBlock], nbytes: int, seconds: Sequence[float]) -> None:
        """Counts rows that went from one instance to the next, and the seconds that each computed."""
        with self._lock:
            for before, one in itertools.pairwise(instances):
                self._traffic.note(str(before.block), str(one.block), nbytes, time.monotonic())
            for one, spent in zip(instances, seconds, strict=True):
                self._computed[str(one.block)] = self._computed.get(str(one.block), 0.0) + spent

    def _replace(self) -> None:
        """Moves an instance closer to those that its rows come from and go to, where traffic says that it
        pays, and closes those that have moved and are idle."""
        now = time.monotonic()
        with self._placing:
            with self._lock:
                workers = {a: one for a, one in self._workers.items() if a not in self._refused}
                traffic, elapsed = self._traffic.traffic(now), max(now - self._looked, 1e-3)
                loads = {content: spent / elapsed for content, spent in self._computed.items()}
                self._computed, self._looked = {}, now
            there = self.instances()
            for one in there:
                if one.is_leaving and not one.rows and now - one.used_at > self.settings.idle:
                    self._close(one)
            for one, address in due_moves(self.settings, there, workers, traffic, loads)[:1]:
                if (one.block, address) not in self._unfit:
                    _log.info("block %d moves from %s to %s", one.block, one.worker.address, address)
                    try:
                        self._load(one.block, workers[address])
                        one.is_leaving = True
                    except CoserveError as error:
                        _log.warning("%s", error)
                        self._unfit.add((one.block, address))

    def _room_for(self, block: int, there: Sequence[HostedBlock]) -> WorkerLink | None:
        """The worker with the fewest blocks; of several one on a host of the blocks before and behind, from
        which all rows come and to which they go."""
        taken = {one.worker.address for one in there}
        beside = [one for other in (block - 1, block + 1) for one in self.instances(other)]
        hosts = {Address.parse(one.worker.address).host for one in beside}
        with self._lock:
            counts = dict.fromkeys(self._workers, 0)
            for one in self._instances.values():
                if one.worker.address in counts:
                    counts[one.worker.address] += 1
            free = [a for a in self._workers if a not in taken and a not in self._refused]
            order = {a: (counts[a], Address.parse(a).host not in hosts, a) for a in free}
            return self._workers[min(free, key=lambda a: order[a])] if free else None

    def _load(self, block: int, worker: WorkerLink) -> None:
        """Opens an instance. Raises the worker's error, and ModelError for another block than that of the
        first instance."""
        own, number = self.settings, next(self._numbers)
        span = own.spans[block]
        asked = structs.replace(own.load, number=number, first=span.first, last=span.last)
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
                room = None if own.room is None else PageRoom(own.room)
                self._instances[number] = HostedBlock(number, block, worker, loaded, room=room)
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

    def publish(self, key: str, adapter: bytes) -> None:
        """As `hold`, for a version of an adapter in training: an instance that cannot hold it is closed, and
        loaded anew."""
        with self._placing:
            with self._lock:
                self._adapters[key] = adapter
            for one in self.instances():
                try:
                    one.worker.ask(HoldAdapter(one.number, key, adapter), one.number, key)
                except Unreachable:  # whoever takes its place gets it
                    pass
                except CoserveError as error:
                    _log.warning("the worker at %s holds no more adapters: %s", one.worker.address, error)
                    self._close(one)

    def _close(self, one: HostedBlock) -> None:
        with self._lock:
            self._instances.pop(one.number, None)
        with suppress(Unreachable):
            one.worker.send(CloseBlock(one.number))

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
        for one in self.instances(self.settings.block_of(layer)):
            with suppress(Unreachable):
                return one.worker.read(ReadFrozen(one.number, path, what))
        raise WeightsUnreadable(f"no worker of the cluster that has {path} can be reached")

    # What is under way

    def start(
        self,
        instances: Sequence[HostedBlock],
        outcome: Outcomes,
    ) -> int:
        """A new number, whose outcome goes to a queue, at once where a worker is gone."""
        number = next(self._numbers)
        with self._lock:
            is_lost = any(not one.worker.is_alive for one in instances)
            if not is_lost:
                self._under_way[number] = _SentNumber(instances, outcome)
        if is_lost:
            outcome.put(Outcome(number))
        return number

    def _settle(
        self, number: int, message: RowsPassed | RowsReturned | RowsFailed, tensors: list[Tensor]
    ) -> None:
        """The outcome of what was under way; one that comes late is nobody's."""
        with self._lock:
            found = self._under_way.pop(number, None)
        if found is not None:
            found.outcome.put(Outcome(number, message, tensors))

    def failed(
        self,
        number: int,
        message: RowsPassed | RowsReturned | RowsFailed | None,
        instances: Sequence[HostedBlock],
    ) -> CoserveError | None:
        """Notes why something did not come back, or what came was not asked for. Returns the error where it
        is nobody's going away."""
        for worker in {one.worker for one in self.instances()}:
            with suppress(Unreachable):
                worker.send(CancelRows((number,)))
        if not isinstance(message, RowsFailed):
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

    def is_avoided(self, sender: HostedBlock, receiver: HostedBlock) -> bool:
        """Tells whether the link between two workers has failed a while ago."""
        with self._lock:
            until = self._avoided.get((sender.worker.address, receiver.worker.address), 0.0)
        return until > time.monotonic()
