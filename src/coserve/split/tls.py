"""TLS for split execution over TCP.

One thread sends while another receives, which OpenSSL does not allow on one connection. So encryption works
on memory (`ssl.MemoryBIO`) under a lock that nobody holds while it waits for the network.
"""

import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coserve.errors import ConfigError, Unreachable

_PART: Final = 1 << 18  # bytes that are encrypted at once
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_ROOM: Final = 1 << 16  # bytes that are received at once


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Identifies an executor to a client, and the client to it.

    `ca` is a file of certificates in PEM that may have signed the executor's, which must name its host; the
    system's are taken if it is None. With `pin`, the SHA-256 of the executor's own certificate in hexadecimal
    (colons are ignored), that one is accepted, and no other. `certificate` and `key` are the client's own, in
    PEM, where the executor asks for one.
    """

    ca: str | Path | None = None
    pin: str = ""
    certificate: str | Path | None = None
    key: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError for files that cannot be used."""
        if self.pin and len(_pin(self.pin)) != 64:
            raise ConfigError("a pin is the SHA-256 of a certificate: 64 hexadecimal digits")
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the client's certificates cannot be used: {_said(error)}") from error
        if self.pin and self.ca is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def connect(self, sock: socket.socket, host: str) -> "TlsStream":
        """Encrypts a connection to an executor. Raises ConfigError for an executor that is not the one
        expected, Unreachable where none speaks TLS."""
        stream = TlsStream(sock, self.context(), server_name=host)
        try:
            stream.handshake()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of the executor at {host} is not accepted: {error.verify_message}"
            ) from error
        except OSError as error:
            raise Unreachable(f"no executor with TLS answers at {host}: {_said(error)}") from error
        if self.pin and not hmac.compare_digest(fingerprint_of(stream.certificate()), _pin(self.pin)):
            raise ConfigError(f"the certificate of the executor at {host} is not the pinned one")
        return stream


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """An executor's certificate and key in PEM (`key` None: in the same file). With `client_ca` clients must
    have a certificate that one of those in this file signed."""

    certificate: str | Path
    key: str | Path | None = None
    client_ca: str | Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            raise ConfigError(f"the executor's certificates cannot be used: {_said(error)}") from error
        return context

    def fingerprint(self) -> str:
        """The certificate's digest, which a client may pin."""
        text = Path(self.certificate).read_text()
        begin, end = text.index(_BEGIN), text.index(_END) + len(_END)
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(text[begin:end]))


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER, in hexadecimal, which a client may pin."""
    return hashlib.sha256(certificate).hexdigest()


class TlsStream:
    """A socket's bytes, encrypted. The handshake is made before the first byte passes."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_name: str | None = None,
        most: int | None = None,
    ) -> None:
        """The client's end with `server_name`, else the executor's. `most` are the bytes that may be
        received, until that is set to None."""
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()  # of the three above
        self._is_open = False
        self.most = most  # bytes that may still be received

    def handshake(self) -> None:
        """Agrees on keys and checks certificates, on one thread. Raises OSError (ssl.SSLError is one)."""
        while not self._is_open:
            try:
                self._tls.do_handshake()
                self._is_open = True
            except ssl.SSLWantReadError:
                self._flush()
                self._incoming.write(self._some())
            except ssl.SSLError:
                with suppress(OSError):  # the alert, which tells the other end why
                    self._flush()
                raise
        self._flush()

    def certificate(self) -> bytes:
        """The other end's certificate, in DER; empty where it has none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def recv(self, bufsize: int, /) -> bytes:
        """See `socket.recv`."""
        into = bytearray(bufsize)
        return bytes(into[: self.recv_into(memoryview(into))])

    def recv_into(self, buffer: memoryview, /) -> int:
        """See `socket.recv_into`. A timeout of the socket raises BlockingIOError."""
        self._ensure_open()
        while True:
            try:
                with self._lock:
                    return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                return 0
            if not (data := self._receive()):
                return 0
            with self._lock:
                self._incoming.write(data)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Sends the first of these bytes; blocks."""
        self._ensure_open()
        part = next(iter(buffers))[:_PART]
        with self._lock:
            sent = self._tls.write(part)
            data = self._outgoing.read()  # includes answers to received messages
        self._socket.sendall(data)
        return sent

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """See `socket.setsockopt`."""
        self._socket.setsockopt(level, option, value)

    def _ensure_open(self) -> None:
        if not self._is_open:
            self.handshake()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            try:
                self._socket.sendall(data)
            except BlockingIOError as error:  # a wait is for bytes that come
                raise ConnectionError("the other end takes no bytes") from error

    def _some(self) -> bytes:
        if not (data := self._receive()):
            raise ConnectionResetError("the stream ended within the handshake")
        return data

    def _receive(self) -> bytes:
        data = self._socket.recv(_ROOM)
        if self.most is not None:
            self.most -= len(data)
            if self.most < 0:
                raise ConnectionError("more bytes than a greeting has")
        return data


def _pin(text: str) -> str:
    return text.replace(":", "").lower()


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _no_password() -> str:
    """Called for an encrypted key, for which OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted, and a server has nobody to ask for the password")
