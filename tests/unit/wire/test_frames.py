"""Messages arrive whole and in order, however the stream is cut."""

import random
import secrets
import socket
import struct
import threading
import time

import pytest

from coserve.wire.frames import FrameReader, send_frame


def test_messages_of_any_size_in_any_pieces() -> None:
    seed = secrets.randbits(32)
    draws = random.Random(seed)
    ours, theirs = socket.socketpair()
    sizes = [0, 1, 3, 1 << 17, *(draws.randrange(5000) for _ in range(50))]
    bodies = [draws.randbytes(size) for size in sizes]
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)

    def send() -> None:
        place = 0
        while place < len(stream):
            step = draws.choice([1, 2, 5, 1000, 100_000])
            ours.sendall(stream[place : place + step])
            place += step
        ours.close()

    thread = threading.Thread(target=send)
    thread.start()
    reader = FrameReader(theirs)
    assert [reader.read() for _ in bodies] == bodies, f"seed {seed}"
    assert reader.read() is None
    thread.join()


def test_messages_that_came_together_are_there_without_the_socket() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack(">I", 1) + b"a" + struct.pack(">I", 1) + b"b")
    reader = FrameReader(theirs)
    assert not reader.has_begun and reader.read() == b"a"
    assert reader.has_begun and reader.read() == b"b" and not reader.has_begun


def test_a_stream_that_ends_within_a_message_or_is_none_is_told() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack(">I", 10) + b"abc")
    ours.close()
    with pytest.raises(ConnectionError, match="within a message"):
        FrameReader(theirs).read()
    ours, theirs = socket.socketpair()
    ours.sendall(b"\xff" * 8)
    with pytest.raises(ConnectionError, match="longer than any"):
        FrameReader(theirs).read()


def test_who_waits_long_enough_hears_of_it_and_goes_on() -> None:
    """And sending is not bounded by that: the other end may be busy for longer."""
    ours, theirs = socket.socketpair()
    reader = FrameReader(theirs, patience=0.05)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.read()
    assert time.monotonic() - started >= 0.04
    ours.sendall(struct.pack(">I", 4) + b"ab")
    with pytest.raises(TimeoutError):
        reader.read()
    ours.sendall(b"cd")
    assert reader.read() == b"abcd"
    large = bytes(1 << 22)
    threading.Timer(0.3, lambda: FrameReader(ours).read()).start()
    send_frame(theirs, large)
