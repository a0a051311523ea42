"""A scheduler's end of one worker: its connection, what was asked of it, and whether it is heard."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor

from coserve.cluster.links import LinkTimer, MeasuredLink
from coserve.cluster.messages import (
    BlockLoaded,
    FrozenRead,
    LifeSign,
    LoadBlock,
    Message,
    PassRows,
    Ping,
    Pong,
    ReadFrozen,
    RowsFailed,
    RowsPassed,
    RowsReturned,
    Settled,
    raise_fault,
)
from coserve.cluster.peer import UNHEARD, Peer, connect, hang_up
from coserve.cluster.records import ClusterLink
from coserve.errors import ConfigError, CoserveError, Unreachable, error_named

_log = logging.getLogger(__name__)
_SLOW: Final = 2.0  # seconds until an answer after which a link is said to be slow
_UNANSWERED: Final = 20.0  # seconds after which who does not answer is away, although it is heard
_LOADING: Final = 600.0  # seconds in which a block is loaded, or an adapter read
Outcome = Callable[[int, RowsPassed | RowsReturned | RowsFailed, list[Tensor]], object]


class WorkerLink:
    """A worker that a scheduler has connected. `passed` is told of rows and pages, `lost` of the end, each
    once and on the connection's thread."""

    def __init__(
        self,
        address: str,
        key: bytes,
        scheduler: str,
        passed: Outcome,
        lost: Callable[["WorkerLink"], object],
    ) -> None:
        """Connects. Raises Unreachable."""
        self.address, self.is_alive = address, True
        self.queued: dict[int, int] = {}  # most rows that have waited at each instance, as last told
        self.memory = self.free = 0  # bytes of its device
        self.timer = LinkTimer()  # of rows to it
        self.links: dict[str, MeasuredLink] = {}  # to other workers, as last told
        self._passed, self._lost = passed, lost
        self._peer: Peer = connect(address, key, scheduler)
        self._pinged = self._answered = 0.0
        self._is_slow = False
        self._lock = threading.Lock()
        self._asked: dict[tuple[Any, ...], Future[Any]] = {}
        self._loaded: dict[int, BlockLoaded] = {}
        threading.Thread(target=self._listen, name=f"coserve-from-{address}", daemon=True).start()

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Sends a message. Raises Unreachable, and the worker is lost then."""
        if isinstance(message, PassRows):
            self.timer.sent(message.number, sum(one.nbytes for one in tensors), time.monotonic())
        try:
            self._peer.send(message, tensors)
        except OSError as error:
            raise Unreachable(f"the worker at {self.address} cannot be reached: {error}") from error

    def ask(self, message: Message, number: int, what: str = "") -> None:
        """Sends a message and waits until it was carried out. Raises the worker's error, and Unreachable."""
        self._call(message, (number, what))

    def load(self, message: LoadBlock) -> BlockLoaded:
        """Loads a block. Raises the worker's error, and Unreachable."""
        self._call(message, (message.number, ""))
        return self._loaded.pop(message.number)

    def read(self, message: ReadFrozen) -> Tensor | None:
        """A frozen parameter. Raises the worker's error, and Unreachable."""
        found: Tensor | None = self._call(message, (message.number, message.path, "read"))
        return found

    def check(self) -> None:
        """Asks for a sign of life, and ends the connection of a worker from which nothing has come for too
        long, or no answer for longer. It counts from the question: whoever asks may be late itself. Nothing
        is asked behind a message that is being sent."""
        now = time.monotonic()
        if self._peer.is_sending:
            return
        if self._answered < self._pinged:
            silent, unanswered = now - max(self._peer.heard, self._pinged), now - self._pinged
            return self.close() if silent > UNHEARD or unanswered > _UNANSWERED else None
        self._pinged = now
        try:
            self.send(Ping())
        except Unreachable:
            self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._peer.close()

    def _call(self, message: Message, key: tuple[Any, ...]) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if not self.is_alive:
                raise Unreachable(f"the worker at {self.address} is gone")
            self._asked[key] = future
        self.send(message)
        try:
            return future.result(_LOADING)
        except TimeoutError:
            raise Unreachable(f"the worker at {self.address} has not answered for {_LOADING:.0f} s") from None

    def _listen(self) -> None:
        try:
            while (found := self._peer.receive()) is not None:
                self._take(*found)
        except OSError:
            pass
        with self._lock:
            self.is_alive = False
            asked, self._asked = self._asked, {}
        for future in asked.values():
            future.set_exception(Unreachable(f"the worker at {self.address} went away"))
        hang_up(self._peer)
        self._lost(self)

    def _take(self, message: Message, tensors: list[Tensor]) -> None:
        match message:
            case Pong():
                self.queued, self.memory, self.free = message.queued, message.memory, message.free
                self._note_links(message.links)
                self._answer_came()
            case LifeSign():
                pass  # it was heard
            case BlockLoaded():
                self._loaded[message.number] = message
            case Settled():
                self.timer.came(message.number, time.monotonic())
                self._settle((message.number, message.what), message.fault, lambda: None)
            case FrozenRead():
                key = message.number, message.path, "read"
                self._settle(key, message.fault, lambda: _parameter(message.dimensions, tensors))
            case RowsPassed() | RowsReturned() | RowsFailed():
                self._passed(message.number, message, tensors)
            case _:
                raise ConnectionError(f"{type(message).__name__} comes from no worker")

    def _note_links(self, told: Mapping[str, tuple[float, float]]) -> None:
        now = time.monotonic()
        try:
            found = {address: MeasuredLink(ClusterLink(*link), now) for address, link in told.items()}
        except ConfigError as error:
            raise ConnectionError(f"a link that is none: {error}") from error
        self.links.update(found)

    def _answer_came(self) -> None:
        """Notes that a question was answered, and says once that the link is slow."""
        self._answered = time.monotonic()
        if (seconds := self._answered - self._pinged) > _SLOW and not self._is_slow:
            self._is_slow = True
            _log.warning(
                "the link to the worker at %s is slow: its sign of life took %.1f s behind other messages",
                self.address, seconds,
            )  # fmt: skip

    def _settle(self, key: tuple[Any, ...], fault: tuple[str, str] | None, result: Callable[[], Any]) -> None:
        with self._lock:
            future = self._asked.pop(key, None)
        if future is None:
            return
        try:
            raise_fault(fault)
            future.set_result(result())
        except CoserveError as error:
            future.set_exception(error)


def error_in(message: RowsFailed) -> CoserveError:
    """The error that a worker tells of."""
    return error_named(message.kind, message.text)


def _parameter(dimensions: int, tensors: Sequence[Tensor]) -> Tensor | None:
    if not dimensions:
        return None
    if len(tensors) != 1 or dimensions > 2:
        raise ConnectionError("a parameter without its numbers")
    found = tensors[0]
    return torch.flatten(found) if dimensions == 1 else found
