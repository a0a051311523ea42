"""A link of a certain rate and latency in front of an address: a relay that sends no more bytes a second, and
each of them so much later."""

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Final

_PIECE: Final = 1 << 17  # bytes at once: 1 ms of 1 Gbit/s
_LEAST: Final = 1 << 10
_BURST: Final = 0.002  # seconds of sending that are saved up while nothing is sent


class PacedLink:
    """Relays connections of `address` to `target`, a port of this machine. All of them together send `rate`
    bytes a second each way, which come `latency` seconds later."""

    def __init__(self, target: int, rate: float, latency: float = 0.0) -> None:
        self._target, self._latency = target, latency
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listening.getsockname()[1]}"
        self._ways = _Pace(rate), _Pace(rate)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def set_rate(self, rate: float) -> None:
        """Has it send so many bytes a second from now on."""
        for way in self._ways:
            way.rate = rate

    def close(self) -> None:
        """Ends the link and all connections over it."""
        for one in (self._listening, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the link is closed
            while True:
                caller, _ = self._listening.accept()
                try:
                    called = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the worker has died
                    caller.close()
                    continue
                self._open += [caller, called]
                for one in (caller, called):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ends = ((caller, called), (called, caller))
                for (source, target), pace in zip(ends, self._ways, strict=True):
                    given = source, target, pace, self._latency
                    threading.Thread(target=_relay, args=given, daemon=True).start()


class _Pace:
    """One way of a link."""

    def __init__(self, rate: float) -> None:
        self.rate, self._free = rate, 0.0  # when it has sent all that it was given
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Returns once the link has sent so many bytes more."""
        with self._lock:
            self._free = max(self._free, time.monotonic() - _BURST) + nbytes / self.rate
            free = self._free
        if (left := free - time.monotonic()) > 0.0:
            time.sleep(left)


def _relay(source: socket.socket, target: socket.socket, pace: _Pace, latency: float) -> None:
    coming: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    if latency:
        threading.Thread(target=_deliver, args=(coming, target), daemon=True).start()
    with suppress(OSError):
        # Over a slow link bytes trickle: at most 10 ms of them come at once.
        while data := source.recv(min(_PIECE, max(int(pace.rate / 100), _LEAST))):
            pace.wait(len(data))
            if latency:
                coming.put((time.monotonic() + latency, data))
            else:
                target.sendall(data)
    coming.put((time.monotonic() + latency, b""))
    for one in (source,) if latency else (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _deliver(coming: "queue.SimpleQueue[tuple[float, bytes]]", target: socket.socket) -> None:
    """Sends what comes when it is there; nothing more is the end."""
    with suppress(OSError):
        while True:
            at, data = coming.get()
            time.sleep(max(at - time.monotonic(), 0.0))
            if not data:
                break
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
