"""Addresses of base executors: `unix:PATH` on one host, `tcp:HOST:PORT` and `tls:HOST:PORT` between hosts."""

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError, ServerError
from coserve.wire.frames import timeout_option

CONNECT_SECONDS: Final = 5.0
_BACKLOG: Final = 64
_LONGEST: Final = 1e9  # seconds of a wait


@dataclass(frozen=True, slots=True)
class Address:
    """`path` is that of a unix socket, empty for TCP. `is_encrypted` is TCP with TLS."""

    path: str = ""
    host: str = ""
    port: int = 0
    is_encrypted: bool = False

    @staticmethod
    def parse(text: str) -> "Address":
        """Raises ConfigError."""
        kind, _, rest = text.partition(":")
        host, _, port = rest.rpartition(":")
        if kind == "unix" and rest and "\0" not in rest and _is_encoded(rest, "utf-8"):
            return Address(path=rest)
        is_port = port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16
        if kind in ("tcp", "tls") and host and _is_encoded(host, "idna") and is_port:
            host = host.removeprefix("[").removesuffix("]")
            return Address(host=host, port=int(port), is_encrypted=kind == "tls")
        raise ConfigError(f"{text!r} is no address: unix:PATH, tcp:HOST:PORT or tls:HOST:PORT")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        kind = "tls" if self.is_encrypted else "tcp"
        return f"unix:{self.path}" if self.path else f"{kind}:{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Tells whether only processes of this host can connect. A host name other than localhost is taken
        to be reachable from others."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self) -> socket.socket:
        """A blocking socket. Raises OSError."""
        if not self.path:
            connected = socket.create_connection((self.host, self.port), CONNECT_SECONDS)
            prepare(connected)
        else:
            connected = socket.socket(socket.AF_UNIX)
            try:
                # The system's own timeout: with one of Python's, a full queue would fail at once.
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout_option(CONNECT_SECONDS))
                connected.connect(self.path)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout_option(0.0))
            except OSError:
                connected.close()
                raise
        connected.settimeout(None)
        return connected

    def listen(self) -> "tuple[socket.socket, Address]":
        """A listening socket, and its address with the port it got. A unix socket is its owner's alone; one
        that a dead process left is replaced. Raises ServerError."""
        try:
            return self._listen_unix() if self.path else self._listen_tcp()
        except OSError as error:
            raise ServerError(f"cannot listen at {self}: {error.strerror or error}") from error

    def remove(self) -> None:
        """Removes the file of a unix socket that was listened at."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)

    def _listen_tcp(self) -> "tuple[socket.socket, Address]":
        family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        return listening, replace(self, port=int(listening.getsockname()[1]))

    def _listen_unix(self) -> "tuple[socket.socket, Address]":
        path = Path(self.path)
        if path.exists():
            self._remove_dead(path)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(self.path)
            os.chmod(self.path, 0o600)  # before a client can connect
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening, self

    def _remove_dead(self, path: Path) -> None:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ServerError(f"cannot listen at {self}: the file is no socket")
        try:
            self.connect().close()
        except ConnectionRefusedError:
            path.unlink()
            return
        raise ServerError(f"cannot listen at {self}: another process does")


def is_seconds(given: object) -> bool:
    """Tells whether it is a number of seconds to wait, as the system's timeouts take it."""
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= _LONGEST


def _is_encoded(name: str, encoding: str) -> bool:
    try:
        return bool(name.encode(encoding))
    except UnicodeError:
        return False


def prepare(connected: socket.socket) -> None:
    """Sets options so that small messages leave at once, and a vanished host is noticed."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def shut(connected: socket.socket) -> None:
    """Ends both directions, which wakes threads that wait at the socket."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
