"""Messages on a stream: each is its length in four bytes, big-endian, and then itself."""

import socket
import struct
from typing import Final

MOST_BYTES: Final = 1 << 31  # of one message: an adapter, or the moments of a large one, are the longest
_LENGTH: Final = struct.Struct(">I")


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Sends one message; waits while the other end does not keep up. Raises OSError."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket) -> bytes | None:
    """Waits for the next message; None where the stream has ended. Raises ConnectionError for what is no
    message, OSError for what the system refuses."""
    head = _receive(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise ConnectionError(f"a message of {length} bytes is longer than any that is sent")
    body = _receive(sock, length)
    if body is None:
        raise ConnectionError("the stream ended within a message")
    return body


def _receive(sock: socket.socket, length: int) -> bytes | None:
    """So many bytes; None where the stream ends before the first of them."""
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = sock.recv_into(view[got:])
        if not count:
            if got:
                raise ConnectionError("the stream ended within a message")
            return None
        got += count
    return bytes(data)
