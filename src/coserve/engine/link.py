"""The engine's end of the socket: one server at a time, which can never stall a step.

A frame is its body's length (four bytes, big-endian) and the body, msgpack by `wire.codec`. Each connection
has a reading and a writing thread, which post to the inbox that the loop reads between two steps. A new
connection replaces the old one.
"""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from coserve.core.request import Request
from coserve.engine.arrivals import Arrivals
from coserve.errors import ConfigError, CoserveError
from coserve.wire.codec import decode_commands, encode_answer
from coserve.wire.messages import Acknowledge, Answer, Command

_HEADER: Final = struct.Struct(">I")
_LARGEST: Final = 64 << 20  # bytes of one frame that is read; a prompt of a million tokens has 5 MB
_BACKLOG: Final = 64 << 20  # bytes that a server has not read, from which on it counts as dead


@dataclass(frozen=True, slots=True)
class Connected:
    """A server has connected, in place of any earlier one."""

    connection: "Connection"


@dataclass(frozen=True, slots=True)
class Received:
    """Commands, in the order they were sent."""

    connection: "Connection"
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection has ended for `reason`."""

    connection: "Connection"
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The process was asked to finish its work for the server and exit."""


@dataclass(frozen=True, slots=True)
class Done:
    """Background work has ended: `then` runs between two steps. `what` names the kind of work."""

    then: Callable[[], None]
    what: str = ""


Item = Connected | Received | Closed | Drained | Done


class Inbox:
    """Queue of items for the loop to handle between two steps, in order. Any thread may `put`.

    An item pauses the training of the step under way, until the next item is asked for, if a caller waits for
    it: finished work, and any command but an Acknowledge (a server sends one for each optimizer step) and a
    request that bears the step's time.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[Item, Arrivals | None]] = queue.SimpleQueue()
        self._arrivals: Arrivals | None = None
        self._handed: Arrivals | None = None  # that of the last item, whose commands are being taken

    def pauses(self, arrivals: Arrivals) -> None:
        """Sets the `arrivals` to which items are announced."""
        self._arrivals = arrivals

    def put(self, item: Item) -> None:
        told = self._arrivals
        if told is not None and not _is_urgent(item, told):
            told = None
        if told is not None:
            told.announce()
        self._items.put((item, told))

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """The next item, once all of the last one is taken; raises queue.Empty after `timeout` seconds."""
        handed, self._handed = self._handed, None
        if handed is not None:
            handed.taken()
        item, self._handed = self._items.get(block, timeout)
        return item


def _is_urgent(item: Item, arrivals: Arrivals) -> bool:
    if isinstance(item, Received):
        return any(_presses(command, arrivals) for command in item.commands)
    return isinstance(item, Done)


def _presses(command: Command, arrivals: Arrivals) -> bool:
    if isinstance(command, Request):
        return arrivals.presses(command.slo)
    return not isinstance(command, Acknowledge)


class Connection:
    """One server. `send` returns at once; `close` may be called from any thread and repeatedly."""

    def __init__(self, sock: socket.socket, inbox: Inbox) -> None:
        self._socket, self._inbox = sock, inbox
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._backlog = 0
        self._lock = threading.Lock()
        self._sender = threading.Thread(target=self._send_frames, name="link-send", daemon=True)
        self._reader = threading.Thread(target=self._read_frames, name="link-read", daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._reader.start()

    def send(self, answer: Answer) -> None:
        """Queues a message. A server with 64 MiB unread is disconnected."""
        body = encode_answer(answer)
        frame = _HEADER.pack(len(body)) + body
        with self._lock:
            self._backlog += len(frame)
            stalled = self._backlog > _BACKLOG
        if stalled:
            self.close()
        else:
            self._frames.put(frame)

    def finish(self, seconds: float) -> None:
        """Waits until all messages are sent, at most `seconds`, and closes."""
        self._frames.put(None)
        self._sender.join(seconds)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._frames.put(None)

    def _send_frames(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._socket.sendall(frame)
            except OSError:
                return  # the reader reports the end
            with self._lock:
                self._backlog -= len(frame)

    def _read_frames(self) -> None:
        reason = "the server closed it"
        try:
            with self._socket.makefile("rb") as stream:
                while header := stream.read(_HEADER.size):
                    body = self._body(stream.read, header)
                    self._inbox.put(Received(self, decode_commands(body)))
        except (OSError, EOFError, msgspec.DecodeError, CoserveError) as error:
            reason = f"{type(error).__name__}: {error}"
        self.close()
        self._socket.close()
        self._inbox.put(Closed(self, reason))

    @staticmethod
    def _body(read: Callable[[int], bytes], header: bytes) -> bytes:
        if len(header) < _HEADER.size:
            raise EOFError("the connection ended within a frame")
        (length,) = _HEADER.unpack(header)
        if length > _LARGEST:
            raise msgspec.DecodeError(f"a frame of {length} bytes; the largest may have {_LARGEST}")
        body = read(length)
        if len(body) < length:
            raise EOFError("the connection ended within a frame")
        return body


class Link:
    """Listens on a Unix socket. Each connection posts Connected, Received…, Closed to the inbox.

    Raises ConfigError where it cannot listen at `path`.
    """

    def __init__(self, path: Path, inbox: Inbox) -> None:
        self._inbox = inbox
        self._current: Connection | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)  # left by a killed engine
            self._listener.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"the engine cannot listen at {path}: {error}") from error
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._accept, name="link-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Accepts no more connections; the current one stays."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._current is not None:
                self._current.close()
            self._current = Connection(sock, self._inbox)
            self._inbox.put(Connected(self._current))
            self._current.start()
