"""Messages on a stream: each with its length in four bytes, big-endian, before it.

A raw payload may follow a message that says its length; it is sent from and received into memory of the
caller's.
"""

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Final

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


def send_with_payload(sock: socket.socket, body: bytes, payload: Sequence[memoryview]) -> None:
    """Sends one message and its payload, uncopied: views of bytes, fewer than 1000, one after the other. The
    socket must block. Raises OSError."""
    left = [memoryview(_LENGTH.pack(len(body)) + body), *filter(len, payload)]
    while left:
        sent = sock.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


class FrameReader:
    """Reads messages from a socket; the socket's only reader."""

    def __init__(self, sock: socket.socket, patience: float = 0.0, most: int = MOST_BYTES) -> None:
        """`patience` is the timeout of `read` in seconds; 0 is none. `most` bytes may be in one message."""
        self._socket, self._most = sock, most
        self._data = bytearray()  # that came, and was not taken
        whole, part = divmod(patience, 1.0)  # of the socket's own: a timeout of Python's would bound sending
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))

    @property
    def has_begun(self) -> bool:
        """Tells whether part of a message has been received."""
        return bool(self._data)

    def read(self) -> bytes | None:
        """Waits for the next message; None at the end of the stream. Raises TimeoutError (the next call
        continues), ConnectionError for invalid bytes, and OSError."""
        while (body := self._next()) is None:
            if not (data := self._receive()):
                if self._data:
                    raise ConnectionError("the stream ended within a message")
                return None
            self._data += data
        return body

    def read_payload(self, into: memoryview) -> None:
        """Fills `into`, a view of bytes, with the bytes after the last message. Raises ConnectionError where
        the stream ends before, TimeoutError (the stream is of no use then), and OSError."""
        there = min(len(self._data), len(into))
        into[:there] = self._data[:there]
        del self._data[:there]
        while there < len(into):
            try:
                count = self._socket.recv_into(into[there:])
            except BlockingIOError as error:
                raise TimeoutError("the payload has not come") from error
            if not count:
                raise ConnectionError("the stream ended within a payload")
            there += count

    def _next(self) -> bytes | None:
        """The next message if it is complete, else None."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        end = _LENGTH.size + _checked(length, self._most)
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


def _checked(length: int, most: int) -> int:
    if length > most:
        raise ConnectionError(f"a message of {length} bytes is longer than any that is sent")
    return length
