"""Connections that have not greeted an executor yet: accepted and read by one thread, which waits for none.

They take no place of a client. They are few, in all and of one address, and each has seconds for its
greeting; where one more comes, the oldest goes. A greeting that came as a whole is handed to a thread of its
own, which looks its key up.
"""

import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from coserve.core.owners import LOOPBACK, owner_of
from coserve.split.address import prepare
from coserve.split.channel import SocketChannel
from coserve.split.messages import ClientHello, ToExecutor
from coserve.split.transport import HANDSHAKE_SECONDS

_log = logging.getLogger(__name__)
MOST_UNGREETED: Final = 128  # connections, a file and 10 KB each; this machine's own may be as many
MOST_OF_ADDRESS: Final = 32  # of one address elsewhere
_MOST_GREETING: Final = 1 << 13  # bytes: the longest name, key and fingerprint take 5,000
_AT_ONCE: Final = 16  # connections that are accepted before others are read
_REFUSED_SECONDS: Final = 0.05  # seconds before accepting again after a refusal, as without files left


@dataclass(eq=False, slots=True)
class Arrival:
    """A connection before its greeting is answered. `close` ends it, on any thread, once it has been handed
    over; it is `refused` while it has its last message."""

    channel: SocketChannel[ToExecutor]
    owner: str
    since: float = field(default_factory=time.monotonic)
    close: Callable[[], None] | None = None
    refused: bool = False

    @property
    def worth(self) -> int:
        """Order in which arrivals stay when there are too many."""
        return 0 if self.refused else 1 if self.close is None else 2


class Greeter:
    """Listens from `start` until `close`."""

    def __init__(
        self,
        listening: socket.socket,
        channel_of: Callable[[socket.socket], SocketChannel[ToExecutor]],
        serve: Callable[[Arrival, ClientHello], None],
        seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """`serve` is called with each greeting, and must not block; the arrival counts until `leave`. Whoever
        has not been greeted `seconds` after it came is closed."""
        self._listening, self._channel_of, self._serve = listening, channel_of, serve
        self._seconds = seconds
        self._arrivals: dict[Arrival, None] = {}  # in order
        self._count: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()  # of both
        self._is_closed = False
        listening.setblocking(False)
        self._woken, self._waking = socket.socketpair()
        self._ready = selectors.DefaultSelector()
        for sock in (listening, self._woken):
            self._ready.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="split-greet", daemon=True)

    def start(self) -> None:
        """Begins to listen; `serve` may be called from now on."""
        self._thread.start()

    def __len__(self) -> int:
        return len(self._arrivals)

    def leave(self, arrival: Arrival) -> bool:
        """Counts an arrival no longer; False where it went before, to make room."""
        with self._lock:
            if arrival not in self._arrivals:
                return False
            del self._arrivals[arrival]
            self._count[arrival.owner] -= 1
            if not self._count[arrival.owner]:
                del self._count[arrival.owner]
            return True

    def close(self) -> None:
        """Accepts nobody from now on, and ends all that have not been greeted."""
        self._is_closed = True
        self._waking.send(b"\0")
        self._thread.join()
        for arrival in list(self._arrivals):
            self._end(arrival)
        self._ready.close()
        self._woken.close()
        self._waking.close()

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._ready.select(self._patience()):
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.data, Arrival) and key.data in self._arrivals:
                    self._hear(key.data)
                del key  # nothing of a connection is kept while others are waited for
            self._end_late()

    def _patience(self) -> float | None:
        """Seconds until the next arrival is late."""
        with self._lock:
            first = next(iter(self._arrivals), None)
        return None if first is None else max(first.since + self._seconds - time.monotonic(), 0.0)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connected, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("no connection can be accepted now: %s", error)
                self._make_room(None)
                time.sleep(_REFUSED_SECONDS)
                return
            try:
                self._add(connected, peer[0] if isinstance(peer, tuple) else None)
            except OSError:  # it has gone
                connected.close()

    def _add(self, connected: socket.socket, host: str | None) -> None:
        prepare(connected)
        connected.setblocking(False)
        arrival = Arrival(self._channel_of(connected), owner_of(host))
        share = MOST_UNGREETED if arrival.owner == LOOPBACK else MOST_OF_ADDRESS
        if self._count[arrival.owner] >= share:
            self._make_room(arrival.owner)
        elif len(self._arrivals) >= MOST_UNGREETED:
            self._make_room(max(self._count, key=self._count.__getitem__))
        with self._lock:
            self._arrivals[arrival] = None
            self._count[arrival.owner] += 1
        self._ready.register(connected, selectors.EVENT_READ, arrival)
        self._hear(arrival)  # of most, the greeting is there

    def _make_room(self, owner: str | None) -> None:
        """Ends the oldest arrival, of `owner` if given: of those that wait for their greeting, if any."""
        with self._lock:
            own = [arrival for arrival in self._arrivals if owner in (None, arrival.owner)]
        if own:
            self._end(min(own, key=lambda arrival: arrival.worth))

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [arrival for arrival in self._arrivals if now - arrival.since >= self._seconds]
        for arrival in late:
            self._end(arrival)

    def _end(self, arrival: Arrival) -> None:
        close = arrival.close
        if not self.leave(arrival):
            return
        if close is not None:
            close()
        else:
            self._forget(arrival)
            arrival.channel.close()

    def _forget(self, arrival: Arrival) -> None:
        with suppress(KeyError, ValueError):
            self._ready.unregister(arrival.channel.socket)

    def _hear(self, arrival: Arrival) -> None:
        """Reads what has come."""
        try:
            hello = arrival.channel.receive_now(_MOST_GREETING)
            if hello is not None and not isinstance(hello, ClientHello):
                raise ConnectionError("a call before the greeting")
        except TimeoutError:
            return
        except OSError as error:
            _log.info("a connection ended before its greeting: %s", error)
            hello = None
        if hello is None:
            self._end(arrival)
            return
        self._forget(arrival)
        arrival.channel.socket.setblocking(True)
        self._serve(arrival, hello)
