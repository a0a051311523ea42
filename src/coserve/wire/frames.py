"""Messages on a stream: each with its length in four bytes, big-endian, before it.

A raw payload may follow a message that says its length; it is sent from and received into memory of the
caller's.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

MOST_BYTES: Final = 1 << 31  # of one message: an adapter, or the moments of a large one, are the longest
_MOST_REPORT: Final = 64 << 20  # bytes of what an engine says to its server
_LENGTH: Final = struct.Struct(">I")
_ROOM: Final = 1 << 16  # bytes that are asked for at once: a plan or a result is one call


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Reads the next message. Raises IncompleteReadError (an EOFError) where the stream ends, ConnectionError
    for an invalid length."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(_checked(length, _MOST_REPORT))


def write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Queues a message for the event loop to send."""
    writer.write(_LENGTH.pack(len(body)) + body)


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Sends one message, blocking while the socket's buffer is full. Raises OSError."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def send_with_payload(sock: "ByteStream", body: bytes, payload: Sequence[memoryview]) -> None:
    """Sends one message and its payload, uncopied: views of bytes, fewer than 1000, one after the other. The
    socket must block. Raises TimeoutError where its SO_SNDTIMEO passes without a byte sent, and OSError."""
    send_views(sock, frame_views(body, payload))


def frame_views(body: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
    """The bytes of one message and its payload."""
    return [memoryview(_LENGTH.pack(len(body)) + body), *filter(len, payload)]


def send_views(sock: "ByteStream", views: Sequence[memoryview]) -> None:
    """Sends bytes, blocking. Raises as `send_with_payload`."""
    left = list(views)
    while left:
        try:
            left = _after(left, sock.sendmsg(left))
        except BlockingIOError as error:
            raise TimeoutError("the other end takes no bytes") from error


def send_views_now(sock: socket.socket, views: Sequence[memoryview]) -> list[memoryview]:
    """Sends what the socket takes without waiting; returns the rest. Raises OSError."""
    left = list(views)
    while left:
        try:
            left = _after(left, sock.sendmsg(left, (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            break
    return left


def _after(views: list[memoryview], sent: int) -> list[memoryview]:
    """Rest of views of which the first `sent` bytes were sent."""
    while views and sent >= len(views[0]):
        sent -= len(views.pop(0))
    if sent:
        views[0] = views[0][sent:]
    return views


class ByteStream(Protocol):
    """A socket, or what encrypts one."""

    def recv(self, bufsize: int, /) -> bytes:
        """Waits for bytes; none at the end."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """Waits for bytes; 0 at the end."""
        ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Sends some of these bytes, and returns how many."""
        ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """Sets an option of the socket."""
        ...


class FrameReader:
    """Reads messages from a socket; the socket's only reader."""

    def __init__(self, sock: ByteStream, patience: float = 0.0, most: int = MOST_BYTES) -> None:
        """`patience` is the timeout of `read` in seconds; 0 is none. `most` bytes may be in one message."""
        self._socket, self._most = sock, most
        self._data = bytearray()  # that came, and was not taken
        # The socket's own timeout: one of Python's would bound sending too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout_option(patience))

    @property
    def has_begun(self) -> bool:
        """Tells whether part of a message has been received."""
        return bool(self._data)

    def read(self, most: int | None = None) -> bytes | None:
        """Waits for the next message, of `most` bytes if given; None at the end of the stream. Raises
        TimeoutError (the next call continues), ConnectionError for invalid bytes, and OSError."""
        while (body := self._next(self._most if most is None else most)) is None:
            if not (data := self._receive()):
                if self._data:
                    raise ConnectionError("the stream ended within a message")
                return None
            self._data += data
        return body

    def read_payload(self, into: memoryview, patience: float = 0.0) -> None:
        """Fills `into`, a view of bytes, with the bytes after the last message. Raises ConnectionError where
        the stream ends before, TimeoutError (the stream is of no use then) where the timeout of `read` passes
        without a byte, `patience` seconds if that is longer; and OSError."""
        there = min(len(self._data), len(into))
        into[:there] = self._data[:there]
        del self._data[:there]
        until = None
        while there < len(into):
            try:
                count = self._socket.recv_into(into[there:])
            except BlockingIOError as error:
                until = until or time.monotonic() + patience
                if time.monotonic() >= until:
                    raise TimeoutError("the payload has not come") from error
                continue
            if not count:
                raise ConnectionError("the stream ended within a payload")
            there, until = there + count, None

    def _next(self, most: int) -> bytes | None:
        """The next message if it is complete, else None."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + _checked(length, most)
        if len(self._data) < end:
            return None
        body = bytes(memoryview(self._data)[_LENGTH.size : end])
        del self._data[:end]
        return body

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_ROOM)
        except BlockingIOError as error:
            raise TimeoutError("no message has come") from error


def timeout_option(seconds: float) -> bytes:
    """The value of SO_RCVTIMEO or SO_SNDTIMEO; 0 is none."""
    whole, part = divmod(seconds, 1.0)
    return struct.pack("ll", int(whole), int(part * 1e6))


def _checked(length: int, most: int) -> int:
    if length > most:
        raise ConnectionError(f"a message of {length} bytes is longer than any that is sent")
    return length
