"""Ways between a server and what it shares with others, which can be cut, hang, or be bad."""

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

_LATENCY: Final = (0.01, 0.06)  # seconds of each piece on a bad network
_LOSS: Final = 0.01  # of its pieces, each with its connection
LinkState = Literal["open", "cut", "held", "bad"]


class Link:
    """Passes the connections that come to a listening socket on to a target. `open`, `cut`, where
    connections break and none is made, `held`, where nothing passes and nobody is told, or `bad`, where
    pieces come late and some are lost with their connection."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        """`connect` gives a connection to the target. Raises OSError."""
        self._listener, self._connect = listener, connect
        self._state: LinkState = "open"
        self._flows = threading.Event()
        self._flows.set()
        self._lock, self._sockets = threading.Lock(), set[socket.socket]()
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, state: LinkState) -> None:
        """Changes the link's state. Connections that were held break."""
        was, self._state = self._state, state
        if state == "held":
            self._flows.clear()
            return
        self._flows.set()
        if state == "cut" or was == "held":
            with self._lock:
                for each in self._sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all connections."""
        self.set("cut")
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._state == "cut":
                    raise ConnectionError
                far = self._connect()
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if self._state == "bad":
                    time.sleep(random.uniform(*_LATENCY))
                    if random.random() < _LOSS:
                        break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if source in self._sockets:
                self._sockets.discard(source)
                source.close()


def unix_link(path: str, target: str) -> Link:
    """A link between two sockets in the file system."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)

    def connect() -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(target)
        except OSError:
            far.close()
            raise
        return far

    return Link(listener, connect)


def tcp_link(host: str, port: int) -> tuple[Link, int]:
    """A link from a port of loopback, and that."""
    listener = socket.create_server(("127.0.0.1", 0))
    link = Link(listener, lambda: socket.create_connection((host, port)))
    return link, int(listener.getsockname()[1])
