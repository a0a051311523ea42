"""The engine's end of the socket: frames, one server at a time, servers that stall or send nonsense."""

import socket
import struct
from pathlib import Path

import pytest

from coserve.engine import link
from coserve.engine.link import Closed, Connected, Connection, Inbox, Item, Link, Received
from coserve.errors import ConfigError
from coserve.wire.codec import decode_answer, encode_commands
from coserve.wire.messages import Acknowledge, Report, Token


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def path(tmp_path: Path, inbox: Inbox) -> Path:
    path = tmp_path / "engine.sock"
    path.write_text("what a killed engine left")
    listening = Link(path, inbox)
    listening.start()
    yield path
    listening.close()


def connect(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.settimeout(60)
    server.connect(str(path))
    return server


def opened(inbox: Inbox) -> Connection:
    item = inbox.get(timeout=60)
    assert isinstance(item, Connected)
    return item.connection


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def received(server: socket.socket) -> Report:
    stream = server.makefile("rb")
    return decode_answer(stream.read(struct.unpack(">I", stream.read(4))[0]))


def until_closed(inbox: Inbox, connection: Connection) -> tuple[list[Item], str]:
    items: list[Item] = []
    while not isinstance(item := inbox.get(timeout=60), Closed) or item.connection is not connection:
        items.append(item)
    return items, item.reason


def test_commands_arrive_in_order_however_they_are_cut(path: Path, inbox: Inbox) -> None:
    server = connect(path)
    connection = opened(inbox)
    data = b"".join(frame(encode_commands([Acknowledge(i), Acknowledge(-i)])) for i in range(50))
    for start in range(0, len(data), 7):
        server.sendall(data[start : start + 7])
    server.close()
    items, reason = until_closed(inbox, connection)
    commands = [command for item in items if isinstance(item, Received) for command in item.commands]
    assert commands == [Acknowledge(sign * i) for i in range(50) for sign in (1, -1)]
    assert "closed" in reason


def test_reports_arrive_whole(path: Path, inbox: Inbox) -> None:
    server = connect(path)
    connection = opened(inbox)
    report = Report(tokens=tuple(Token(f"r{i}", i) for i in range(5000)))
    connection.send(report)
    assert received(server) == report
    connection.send(Report(drained=True))
    connection.finish(10)
    assert received(server).drained
    server.close()


def test_a_new_server_takes_the_place_of_the_old(path: Path, inbox: Inbox) -> None:
    first = connect(path)
    old = opened(inbox)
    second = connect(path)
    items, _ = until_closed(inbox, old)
    assert first.recv(1) == b""
    new = next(i for i in items if isinstance(i, Connected)).connection if items else opened(inbox)
    old.send(Report(drained=True))  # says nothing to nobody
    new.send(Report(drained=True))
    assert received(second).drained
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(b"nonsense"), "msgpack|Decode|Expected"),
        (frame(encode_commands([]) + b"?"), "trailing"),
        (struct.pack(">I", 2**31) + b"x", "2147483648"),
        (b"\0\0", "within a frame"),
        (struct.pack(">I", 100) + b"only this", "within a frame"),
    ],
)
def test_nonsense_ends_its_connection_and_nothing_else(
    path: Path, inbox: Inbox, data: bytes, said: str
) -> None:
    server = connect(path)
    connection = opened(inbox)
    server.sendall(data)
    server.shutdown(socket.SHUT_WR)
    items, reason = until_closed(inbox, connection)
    assert items == [] and any(word in reason for word in said.split("|"))
    assert server.recv(1) == b""
    server.close()
    connect(path).close()
    opened(inbox)


def test_a_path_where_nobody_can_listen(tmp_path: Path, inbox: Inbox) -> None:
    for path in (tmp_path / "no" / "such" / "folder", tmp_path / ("long" * 40)):
        with pytest.raises(ConfigError, match="cannot listen"):
            Link(path, inbox)


def test_a_server_that_reads_nothing_never_stalls_and_is_cut_off(
    path: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_BACKLOG", 4 << 20)
    server = connect(path)
    connection = opened(inbox)
    report = Report(tokens=tuple(Token(f"r{i}", i) for i in range(5000)))
    for _ in range(100):
        connection.send(report)
    _, reason = until_closed(inbox, connection)
    assert "closed" in reason
    connect(path).close()
    opened(inbox)
    server.close()
