"""A worker of a cluster: block instances, each with a queue, one thread that computes for all of them, and
one that reads and writes pages which move, beside what is computed.

Whoever calls is a scheduler, whose instances are closed with its connection, or another worker, which brings
rows and pages. Rows go on to their next block's worker without passing the scheduler; from the last block
they go back to it.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from msgspec import DecodeError, structs
from torch import Tensor

from coserve.cluster.agent import BATCH_ROWS, COUNTDOWN, AgentQueue, precedence
from coserve.cluster.ahead import Speculator
from coserve.cluster.blocks import BlockParameters, decode_sites, encode_sites, files_digest, load_block
from coserve.cluster.instance import ArrivedRows, OpenBlock, check_rows
from coserve.cluster.messages import (
    MOST_LINKS,
    BlockLoaded,
    CancelRows,
    CloseBlock,
    CopyPages,
    DropVersions,
    FrozenRead,
    HoldAdapter,
    LifeSign,
    LoadBlock,
    Message,
    PassRows,
    Ping,
    Pong,
    PredictedRows,
    PutPages,
    ReadFrozen,
    RowsFailed,
    RowsPassed,
    RowsVerified,
    Settled,
    TellSites,
    TrainRows,
    fault_of,
)
from coserve.cluster.outbox import Outbox, Sent
from coserve.cluster.peer import Peer, hang_up
from coserve.cluster.returning import Trained
from coserve.core.contained import contained
from coserve.errors import CoserveError, InternalError, ModelError, RequestError
from coserve.memory.measured import device_capacity
from coserve.model.base import Base
from coserve.split.address import Address, shut

_log = logging.getLogger(__name__)
_BEAT: Final = 1.0  # seconds between signs of life
_TOLD: Final = 3  # of these, in which a link that was used is told
_TRAINING: Final = 256  # windows of a scheduler that may wait at a worker
_CANCELLED: Final = 4096  # numbers that are remembered of each scheduler
Place = tuple[str, int]  # a scheduler's id and its instance's number
FindModel = Callable[[str], Path]
_Move = tuple[Callable[..., object], CopyPages | PutPages, tuple[Tensor, ...]]  # of pages


@dataclass(eq=False)
class _Instance:
    """An instance with its queue."""

    block: OpenBlock
    queue: AgentQueue[ArrivedRows]
    most: int = 0  # rows that have waited at once since its scheduler was told


def _order(now: float, one: _Instance) -> tuple[bool, int, float]:
    behind = one.block.base.depth - one.block.span.stop
    return precedence(behind, one.queue.oldest or now, now)


@dataclass(frozen=True, eq=False)
class _Training:
    """Training rows on their way through a block's layers, one at each step."""

    message: TrainRows
    steps: Iterator[Trained | None]


@dataclass(eq=False)
class _Scheduler:
    """A scheduler that is connected; one that has asked for a sign of life gets more of them."""

    peer: Peer
    has_asked: bool = False
    cancelled: deque[int] = field(default_factory=lambda: deque(maxlen=_CANCELLED))


class BlockHost:
    """A worker. `find_model` gives the folder of a model by its name; `device` computes. Rows are packed
    up to `batch_rows`; sequences are expected back within `countdown` seconds."""

    def __init__(
        self,
        listen: str,
        key: bytes,
        find_model: FindModel,
        device: str = "cpu",
        batch_rows: int = BATCH_ROWS,
        countdown: float = COUNTDOWN,
    ) -> None:
        """Begins to listen. Raises ConfigError and ServerError."""
        self._key, self._find_model, self._device = key, find_model, device
        self._settings = batch_rows, countdown
        self._room = partial(device_capacity, torch.device(device))
        self._listening, bound = Address.parse(listen).listen()
        self._bound, self.address = bound, str(bound)
        self._lock = threading.Condition()  # of all below
        self._schedulers: dict[str, _Scheduler] = {}
        self._instances: dict[Place, _Instance] = {}
        self._tasks: deque[Callable[[], object]] = deque()  # beside rows, for the computing thread
        self._moves: queue.SimpleQueue[_Move | None] = queue.SimpleQueue()
        self._running: list[PassRows] = []  # what the computing thread computes
        self._moving = threading.Lock()  # what is cancelled under it is not written afterwards
        self._training: deque[_Training] = deque()  # behind all rows
        self._outboxes: dict[str, Outbox] = {}
        self._peers: set[Peer] = set()
        self._is_closed = False
        self._has_ended = threading.Event()
        self._speculator = Speculator(self._forward, self._go_on, self._queue_arrived)
        self._loading = threading.Lock()  # one block at a time
        self._bases: dict[tuple[str, int, int, str], tuple[Base, str]] = {}
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}
        self._threads = [
            threading.Thread(target=run, name=f"coserve-block-{run.__name__.strip('_')}", daemon=True)
            for run in (self._accept, self._compute, self._move, self._beat)
        ]

    def start(self) -> "BlockHost":
        """Starts to accept callers and to compute."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._is_closed = True
            peers, outboxes = list(self._peers), list(self._outboxes.values())
            self._lock.notify_all()
        self._has_ended.set()
        self._moves.put(None)
        shut(self._listening)
        self._listening.close()
        self._bound.remove()
        for peer in peers:
            peer.close()
        for outbox in outboxes:
            outbox.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    # Callers

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(Peer(sock),), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        """Serves one caller until its connection ends."""
        scheduler = ""
        with self._lock:
            self._peers.add(peer)
        try:
            scheduler = peer.challenge(self._key)
            if scheduler:
                with self._lock:
                    if (before := self._schedulers.get(scheduler)) is not None:
                        before.peer.close()
                    self._drop(scheduler)
                    self._schedulers[scheduler] = _Scheduler(peer)
                self._speculator.cancel(scheduler)
            while (found := peer.receive()) is not None:
                self._take(peer, scheduler, *found)
        except OSError as error:
            if not self._is_closed:
                _log.info("a connection ended: %s", error)
        finally:
            with self._lock:
                self._peers.discard(peer)
                own = self._schedulers.get(scheduler)
                if is_gone := own is not None and own.peer is peer:
                    self._drop(scheduler)
            if is_gone:
                self._speculator.cancel(scheduler)
            hang_up(peer)

    def _beat(self) -> None:
        """Tells schedulers that this worker lives, unless they are being told something else."""
        while not self._has_ended.wait(_BEAT):
            with self._lock:
                peers = [one.peer for one in self._schedulers.values() if one.has_asked]
            for peer in peers:
                if not peer.is_sending:
                    with suppress(OSError):  # its connection's thread notices
                        peer.send(LifeSign())

    def _drop(self, scheduler: str) -> None:
        """Closes a scheduler's instances; the lock is held."""
        self._schedulers.pop(scheduler, None)
        for place in [place for place in self._instances if place[0] == scheduler]:
            del self._instances[place]
        self._training = deque(one for one in self._training if one.message.scheduler != scheduler)
        self._forget_bases()

    def _forget_bases(self) -> None:
        """Frees blocks that no instance has; the lock is held."""
        used = {id(one.block.base) for one in self._instances.values()}
        self._bases = {key: found for key, found in self._bases.items() if id(found[0]) in used}

    def _take(self, peer: Peer, scheduler: str, message: Message, tensors: list[Tensor]) -> None:
        """Does what a message asks for. Raises OSError where the caller cannot be answered, and
        ConnectionError for a message that no such caller sends."""
        match message:
            case PassRows():
                self._queue_rows(message, tensors)
                if not scheduler or not peer.is_sending:  # else it would wait behind results
                    peer.send(Settled(message.number))
                return
            case PutPages():
                self._put_pages(message, tensors)
                if not scheduler:
                    peer.send(Settled(message.number))
                return
            case RowsVerified():
                self._speculator.verified(message)
                return peer.send(Settled(message.number))
        if not scheduler:
            raise ConnectionError(f"{type(message).__name__} comes from schedulers alone")
        match message:
            case Ping():
                room = self._room()
                with self._lock:
                    if (own := self._schedulers.get(scheduler)) is not None:
                        own.has_asked = True
                peer.send(Pong(self._queued(scheduler), room.total, room.free, self._links()))
            case LoadBlock():
                self._settle(peer, message.number, "", partial(self._load, peer, scheduler, message))
            case TellSites():
                self._settle(peer, message.number, "sites", partial(self._tell, scheduler, message))
            case HoldAdapter():
                self._settle(peer, message.number, message.key, partial(self._hold, scheduler, message))
            case DropVersions():
                with suppress(RequestError):
                    self._later(self._find(scheduler, message.number).block.loaded.drop, message.keys)
            case ReadFrozen():
                self._read(peer, scheduler, message)
            case CloseBlock():
                with self._lock:
                    self._instances.pop((scheduler, message.number), None)
                    self._forget_bases()
            case CancelRows():
                self._cancel(scheduler, message.numbers)
            case CopyPages():
                self._carry(self._copy_pages, message)
            case TrainRows():
                self._queue_training(message, tensors)
            case _:
                raise ConnectionError(f"{type(message).__name__} is no message for a worker")

    def _queued(self, scheduler: str) -> dict[int, int]:
        """The most rows that have waited at each of a scheduler's instances since this was last asked."""
        with self._lock:
            own = {place[1]: one for place, one in self._instances.items() if place[0] == scheduler}
            found = {number: one.most for number, one in own.items()}
            for number, one in own.items():
                one.most = self._rows_of(one, scheduler, number)
        return found

    def _links(self) -> dict[str, tuple[float, float]]:
        """The links to other workers that messages have shown since a few signs of life ago."""
        with self._lock:
            shown = {address: outbox.timer.measured for address, outbox in self._outboxes.items()}
        since = time.monotonic() - _TOLD * _BEAT
        recent = {address: one.link for address, one in shown.items() if one is not None and one.at > since}
        return {address: (one.rate, one.latency) for address, one in [*recent.items()][:MOST_LINKS]}

    def _rows_of(self, one: _Instance, scheduler: str, number: int) -> int:
        """Rows that wait at an instance, of answers and of training; the lock is held."""
        training = (own.message for own in self._training if own.message.scheduler == scheduler)
        rows = sum(sum(own.lengths) for own in training if own.instance == number)
        return one.queue.rows + rows

    def _settle(self, peer: Peer, number: int, what: str, act: Callable[[], object]) -> None:
        """Acts on a thread of its own, as signs of life are asked for meanwhile."""
        threading.Thread(target=self._act, args=(peer, number, what, act), daemon=True).start()

    def _act(self, peer: Peer, number: int, what: str, act: Callable[[], object]) -> None:
        """Acts, and tells the caller of the outcome."""
        fault = None
        try:
            act()
        except CoserveError as error:
            fault = fault_of(error)
        except (RuntimeError, MemoryError, OSError, DecodeError) as error:
            fault = fault_of(ModelError(f"the worker at {self.address}: {error}"))
        with suppress(OSError):  # its connection's thread notices
            peer.send(Settled(number, what, fault))

    def _find(self, scheduler: str, number: int) -> _Instance:
        with self._lock:
            if (found := self._instances.get((scheduler, number))) is None:
                raise RequestError(f"the worker at {self.address} has no instance {number}")
            return found

    # Blocks

    def _load(self, peer: Peer, scheduler: str, asked: LoadBlock) -> None:
        with self._loading:
            folder = self._find_model(asked.model)
            if self._digest(folder) != asked.files:
                raise ModelError(
                    f"the files of {asked.model!r} at the worker {self.address} are others than the "
                    "scheduler's, so its blocks are refused"
                )
            key = (asked.files, asked.first, asked.last, asked.dtype)
            with self._lock:
                found = self._bases.get(key)
            span = range(asked.first, asked.last)
            if found is None:
                dtype = "auto" if asked.dtype == "auto" else getattr(torch, asked.dtype)
                found = load_block(folder, span, dtype, self._device)
            base, content = found
            block = OpenBlock(base, content, asked)
            every_state, state = block.state_nbytes
            one = _Instance(block, AgentQueue(*self._settings))
            with self._lock:
                self._bases[key] = found
                self._instances[scheduler, asked.number] = one
            own = {path: site for path, site in base.sites.items() if site.stage in span}
            peer.send(
                BlockLoaded(
                    asked.number,
                    content,
                    base.nbytes,
                    block.attention.nbytes + every_state,
                    block.attention.page_nbytes,
                    base.max_positions,
                    encode_sites(own),
                    state,
                )
            )

    def _digest(self, folder: Path) -> str:
        """The content of a model's files, which is computed again once they have changed."""
        stats = [path.stat() for path in sorted(folder.iterdir()) if path.is_file()]
        state = tuple(part for one in stats for part in (one.st_ino, one.st_size, one.st_ctime_ns))
        known = self._digests.get(str(folder))
        if known is None or known[0] != state:
            known = self._digests[str(folder)] = state, files_digest(folder)
        return known[1]

    def _tell(self, scheduler: str, message: TellSites) -> None:
        self._find(scheduler, message.number).block.tell_sites(decode_sites(message.sites))

    def _hold(self, scheduler: str, message: HoldAdapter) -> None:
        self._find(scheduler, message.number).block.hold(message.adapter)

    def _read(self, peer: Peer, scheduler: str, message: ReadFrozen) -> None:
        number, path, what = message.number, message.path, message.what
        try:
            frozen = self._find(scheduler, number).block.base.frozen
            if what not in ("weight", "bias", "gain"):
                raise RequestError(f"{what!r} is no parameter of a module")
            assert isinstance(frozen, BlockParameters), "as a block is loaded"
            found = frozen.read(path, what)
        except CoserveError as error:
            return peer.send(FrozenRead(number, path, fault=fault_of(error)))
        if found is None:
            return peer.send(FrozenRead(number, path))
        rows = found.detach().cpu().reshape(-1, found.shape[-1])
        return peer.send(FrozenRead(number, path, found.ndim), [rows])

    # Rows and pages

    def _queue_rows(self, message: PassRows, tensors: Sequence[Tensor]) -> None:
        place = message.scheduler, message.hops[0].instance if message.hops else -1
        with self._lock:
            one, scheduler = self._instances.get(place), self._schedulers.get(message.scheduler)
            if scheduler is None or message.number in scheduler.cancelled:
                return
        if one is None:
            error = RequestError(f"the worker at {self.address} has no instance {place[1]}")
            return self._fail(message, error)
        arrived = ArrivedRows(message, check_rows(message, tensors, one.block.base.hidden_size))
        if isinstance(message, PredictedRows):
            self._speculator.came(message)
        elif self._speculator.refuted(arrived):
            return
        self._queue_arrived(arrived)

    def _queue_arrived(self, arrived: ArrivedRows) -> None:
        """Queues rows at their instance."""
        message = arrived.message
        place = message.scheduler, message.hops[0].instance
        keys = [segment.key for segment in message.segments]
        has_pages = all(segment.context for segment in message.segments)
        with self._lock:
            if (one := self._instances.get(place)) is not None:
                one.queue.put(arrived, keys, len(arrived.hidden), has_pages, time.monotonic())
                one.most = max(one.most, one.queue.rows)
                self._lock.notify_all()
        if one is None:  # it was closed meanwhile
            self._fail(message, RequestError(f"the worker at {self.address} has no instance {place[1]}"))

    def _queue_training(self, message: TrainRows, tensors: Sequence[Tensor]) -> None:
        """Queues training rows. A scheduler has a few under way, so what it sends beyond is refused."""
        try:
            one = self._find(message.scheduler, message.instance)
            with self._lock:
                count = sum(own.message.scheduler == message.scheduler for own in self._training)
                if count >= _TRAINING:
                    raise RequestError(
                        f"the worker at {self.address} has {count} windows in training already"
                    )
                self._training.append(_Training(message, one.block.train(message, tensors)))
                one.most = max(one.most, self._rows_of(one, message.scheduler, message.instance))
                self._lock.notify_all()
        except CoserveError as error:
            self._fail(message, error)

    def _put_pages(self, message: PutPages, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != 1:
            raise ConnectionError("pages without their bytes")
        self._carry(self._write_pages, message, tensors[0])

    def _carry(self, act: Callable[..., object], message: CopyPages | PutPages, *data: Tensor) -> None:
        """Has the moving thread read or write pages; states are changed by passes, so the computing thread
        moves them."""
        if message.state is None:
            self._moves.put((act, message, data))
        else:
            self._later(self._moved, act, message, data)

    def _later(self, act: Callable[..., object], *given: Any) -> None:
        """Has the computing thread do something between two passes."""
        with self._lock:
            self._tasks.append(lambda: act(*given))
            self._lock.notify_all()

    def _cancel(self, scheduler: str, numbers: Sequence[int]) -> None:
        with self._moving, self._lock:
            self._schedulers[scheduler].cancelled.extend(numbers)
            for place, one in self._instances.items():
                if place[0] == scheduler:
                    one.queue.drop(lambda arrived: arrived.message.number in numbers)
            self._keep_training(lambda own: own.scheduler != scheduler or own.number not in numbers)
        self._speculator.cancel(scheduler, numbers)

    def _is_cancelled(self, scheduler: str, number: int) -> bool:
        with self._lock:
            own = self._schedulers.get(scheduler)
            return own is None or number in own.cancelled

    def _runs_cancelled(self) -> bool:
        """Tells whether rows that are computed now no longer count; the lock is held."""
        known = ((self._schedulers.get(one.scheduler), one.number) for one in self._running)
        return any(own is None or number in own.cancelled for own, number in known)

    def _compute(self) -> None:
        """The computing thread: what was asked for beside rows first, then an instance with rows by their
        precedence, then a layer of training."""
        while True:
            batch, training = list[ArrivedRows](), None
            with self._lock:
                while not (waiting := [one for one in self._instances.values() if len(one.queue)]):
                    if self._tasks or self._training or self._is_closed:
                        break
                    self._lock.wait()
                if self._is_closed:
                    return
                task = self._tasks.popleft() if self._tasks else None
                if task is None and waiting:
                    chosen = min(waiting, key=partial(_order, time.monotonic()))
                    batch = chosen.queue.take(time.monotonic())
                    self._running = [arrived.message for arrived in batch]
                elif task is None:
                    training = self._training[0]
            try:
                if task is not None:
                    task()
                elif training is not None:
                    self._train(training)
                else:
                    for arrived in batch:
                        self._speculator.predict(chosen.block, arrived)
                    self._pass(chosen, batch)
            except Exception as error:
                _log.exception("a worker's task failed")
                messages = [arrived.message for arrived in batch] if training is None else [training.message]
                for message in messages:
                    self._fail(message, InternalError(f"the worker at {self.address}: {error}"))
            if batch:
                with self._lock:
                    self._running = []
                    self._lock.notify_all()

    def _train(self, one: _Training) -> None:
        """Takes training rows through their next layer."""
        goes_on, found = False, None
        try:
            found = next(one.steps)
            goes_on = found is None
        except (CoserveError, RuntimeError, MemoryError) as error:
            told = error if isinstance(error, CoserveError) else contained(error, "training in a block")
            self._fail(one.message, told)
        finally:
            if not goes_on:
                self._keep_training(lambda message: message is not one.message)
        if found is not None:
            self._reply(one.message.scheduler, *found)

    def _keep_training(self, is_kept: Callable[[TrainRows], bool]) -> None:
        with self._lock:
            self._training = deque(one for one in self._training if is_kept(one.message))

    def _pass(self, one: _Instance, batch: Sequence[ArrivedRows]) -> None:
        """Takes a batch through its block; where that fails its messages pass one by one, so that one of them
        fails alone."""
        began = time.perf_counter()
        try:
            passed = one.block.run(batch)
        except (CoserveError, RuntimeError, MemoryError) as error:
            if len(batch) > 1:
                for arrived in batch:
                    self._pass(one, [arrived])
            else:
                told = (
                    error if isinstance(error, CoserveError) else contained(error, "a pass through a block")
                )
                self._fail(batch[0].message, told)
            return
        seconds = time.perf_counter() - began
        now = time.monotonic()
        with self._lock:
            for arrived in batch:
                for segment in arrived.message.segments:
                    if segment.goes_on:
                        one.queue.expect(segment.key, now)
        for arrived, hidden in zip(batch, passed, strict=True):
            if isinstance(arrived.message, PredictedRows):
                self._speculator.computed(arrived.message, hidden, seconds)
            else:
                self._go_on(arrived.message, hidden, seconds)

    def _go_on(self, message: PassRows, hidden: Tensor, seconds: float) -> None:
        """Sends rows to their next block, or back."""
        spent = (*message.seconds, seconds)
        rest, verified = message.hops[1:], message.verified
        if not rest:
            return self._reply(message.scheduler, RowsPassed(message.number, spent, verified), [hidden])
        if message.hops[0].surrogate:
            right = self._speculator.verify(message, hidden, spent)
            if right:
                return
            verified = verified if right is None else (*verified, False)
        sent = structs.replace(message, hops=rest, seconds=spent, verified=verified)
        self._forward(rest[0].address, sent, [hidden])

    def _forward(self, address: str, message: Sent, tensors: Sequence[Tensor]) -> None:
        if address == self.address:
            match message:
                case PassRows():
                    return self._queue_rows(message, tensors)
                case RowsVerified():
                    return self._speculator.verified(message)
                case _:
                    return self._put_pages(message, tensors)
        if self._is_cancelled(message.scheduler, message.number):
            return
        with self._lock:
            if self._is_closed:
                return
            if (outbox := self._outboxes.get(address)) is None:
                outbox = self._outboxes[address] = Outbox(address, self._key, self._not_sent)
        outbox.put(message, tensors)

    def _not_sent(self, message: Sent, address: str, error: CoserveError) -> None:
        self._fail(message, error, address)

    def _fail(
        self,
        message: PassRows | PutPages | RowsVerified | CopyPages | TrainRows,
        error: CoserveError,
        unreached: str = "",
    ) -> None:
        kind, text = fault_of(error)
        self._reply(message.scheduler, RowsFailed(message.number, kind, text, unreached))

    def _reply(self, scheduler: str, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        with self._lock:
            own = self._schedulers.get(scheduler)
        if own is not None:
            with suppress(OSError):  # its connection's thread notices
                own.peer.send(message, tensors)

    def _copy_pages(self, message: CopyPages) -> None:
        try:
            block = self._find(message.scheduler, message.instance).block
            state = message.state
            data = block.read_pages(message.pages) if state is None else block.read_state(state)
        except CoserveError as error:
            return self._fail(message, error)
        pages = message.pages if message.into is None else message.into
        put = PutPages(message.number, message.scheduler, message.target.instance, pages, state)
        return self._forward(message.target.address, put, [data])

    def _write_pages(self, message: PutPages, data: Tensor) -> None:
        """Writes pages that no pass reads yet: the scheduler waits for them, or cancels the move before it
        gives them to another sequence. A pass that was cancelled while it ran may still write there, so it
        ends before."""
        try:
            with self._moving:
                with self._lock:
                    self._lock.wait_for(lambda: self._is_closed or not self._runs_cancelled())
                if self._is_cancelled(message.scheduler, message.number):
                    return
                block = self._find(message.scheduler, message.instance).block
                if message.state is None:
                    block.write_pages(message.pages, data)
                else:
                    block.write_state(message.state, data)
        except CoserveError as error:
            return self._fail(message, error)
        self._reply(message.scheduler, RowsPassed(message.number))

    def _move(self) -> None:
        """The moving thread: a page that waited for a pass would cost a link most of its rate."""
        while (move := self._moves.get()) is not None:
            self._moved(*move)

    def _moved(
        self, act: Callable[..., object], message: CopyPages | PutPages, data: Sequence[Tensor]
    ) -> None:
        try:
            act(message, *data)
        except Exception as error:
            _log.exception("pages could not be moved")
            self._fail(message, InternalError(f"the worker at {self.address}: {error}"))
