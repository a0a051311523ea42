"""Connections that send nothing, too little, or what is no HTTP: ended in time, and others are served."""

import asyncio
import json
import logging
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from coserve.serve.errors import ApiError
from coserve.serve.http.connections import ConnectionLimits
from coserve.serve.http.listener import Listener
from coserve.serve.http.shedding import LoadShedder
from hostile_bodies import TEXT, text
from serving import Play, World

STALL = 0.6  # seconds
PATIENCE = 30.0  # seconds; only a hang takes so long
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def listening(
    world: World, shedder: LoadShedder | None = None, logs_refused: bool = False, **limits: float
) -> AsyncIterator[tuple[str, int]]:
    """The application behind a real socket, with these limits; its address."""
    given = ConnectionLimits(**{"stall_seconds": STALL, **limits})  # type: ignore[arg-type]
    own = socket.create_server(("127.0.0.1", 0))
    server = Listener(world.app, own, given, shedder, logs_refused=logs_refused)
    task = asyncio.create_task(server.run())
    try:
        await server.started()
        yield server._socket.getsockname()
    finally:
        server.stop()
        await task


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection ends."""
    came = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            while piece := await reader.read(65536):
                came += piece
    return came


async def asked(address: tuple[str, int], raw: bytes) -> bytes:
    """All that comes in answer to these bytes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(raw)
    try:
        return await end_of(reader)
    finally:
        writer.close()


def get(path: str = "/health", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def is_served(address: tuple[str, int]) -> bool:
    return b" 200 OK" in await asked(address, get("/health", "Connection: close"))


def post(*headers: str, body: bytes = b"") -> bytes:
    lines = [f"POST {TEXT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_silent_connections_are_closed_and_others_served(play: Play) -> None:
    async def story(world: World) -> None:
        async with listening(world) as address:
            silent = [await asyncio.open_connection(*address) for _ in range(300)]
            assert await is_served(address)
            assert set(await asyncio.gather(*(end_of(reader) for reader, _ in silent))) == {b""}
            for _, writer in silent:
                writer.close()

    play(story)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"", b"G"),
        (b"GET / HTTP/1.1\r\nX-", b"a"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n"),
        (post("Content-Length: 5000"), b" "),
        (post("Transfer-Encoding: chunked"), b"1\r\n \r\n"),
        (get() + b"G", b"E"),
    ],
)
def test_bytes_that_trickle_end(shared_play: Play, begins: bytes, goes_on: bytes) -> None:
    async def story(world: World) -> None:
        async with listening(world) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(begins)
            reading = asyncio.create_task(end_of(reader))
            async with asyncio.timeout(PATIENCE):
                with suppress(ConnectionError):
                    while not reading.done():
                        writer.write(goes_on)
                        await writer.drain()
                        await asyncio.sleep(0.02)
            assert b" 408 " in await reading and await is_served(address)
            writer.close()

    shared_play(story)


def test_a_body_that_comes_steadily_may_take_long(play: Play) -> None:
    body = json.dumps(text(prompt="a b " * 200, user=" " * 4000)).encode()

    async def story(world: World) -> None:
        async with listening(world) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(post(f"Content-Length: {len(body)}"))
            pieces = [body[start : start + 256] for start in range(0, len(body), 256)]
            for piece in pieces:  # more than the least rate, for three times as long as a stall
                writer.write(piece)
                await asyncio.sleep(3 * STALL / len(pieces))
            assert b" 200 OK" in await reader.readline()
            writer.close()

    play(story)


def test_who_does_not_read_is_not_waited_for(play: Play) -> None:
    """A stream whose reader has stopped ends, with the work for it."""

    async def story(world: World) -> None:
        async with listening(world) as address:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, address)
            body = json.dumps(text(stream=True, max_tokens=2000, n=16)).encode()
            await loop.sock_sendall(slow, post(f"Content-Length: {len(body)}", body=body))
            await world.until(lambda: world.state.queue.inside == 16)
            async with asyncio.timeout(PATIENCE):
                await world.until(lambda: not world.state.queue.inside)
            assert await is_served(address)
            slow.close()

    play(story)


def test_an_address_has_its_share_and_the_idle_make_room(play: Play) -> None:
    async def story(world: World) -> None:
        async with listening(world, most=8, stall_seconds=PATIENCE) as address:
            held = [await asyncio.open_connection(*address) for _ in range(8)]
            refused = await asked(address, get())
            assert b" 503 " in refused and b"Retry-After" in refused
            await asyncio.sleep(1.1)
            assert await is_served(address)  # the first of those who asked for nothing has gone
            assert await end_of(held[0][0]) == b""
            for _, writer in held:
                writer.close()
        async with listening(world, most_address=1, stall_seconds=PATIENCE) as address:
            held = [await asyncio.open_connection(*address) for _ in range(4)]
            assert b" 503 " in await asked(address, get())
            for _, writer in held:
                writer.close()

    play(story)


def test_trickling_holds_no_place(play: Play) -> None:
    """Headers that come byte by byte, and bytes after a refusal, go for a request that comes."""

    async def story(world: World) -> None:
        async with listening(world, stall_seconds=30.0, most=8, most_address=2) as address:
            refused = post("Content-Length: 1000000")
            slow = [await asyncio.open_connection(*address) for _ in range(8)]
            for number, (_, writer) in enumerate(slow):
                writer.write(refused if number % 2 else b"GET /health")

            async def trickle() -> None:
                while True:
                    await asyncio.sleep(0.05)
                    for _, writer in slow:
                        writer.write(b"a")

            trickling = asyncio.create_task(trickle())
            await asyncio.sleep(1.5)
            for _ in range(3):
                assert await is_served(address)
            trickling.cancel()
            for _, writer in slow:
                writer.close()

    play(story)


def test_a_body_that_nobody_wants_is_not_taken(play: Play) -> None:
    async def story(world: World) -> None:
        await world.state.store.tenants.create_key("ann")
        async with listening(world) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(post(f"Content-Length: {8 * 2**20}"))
            assert b" 401 " in await reader.readline()
            taken = 0
            with suppress(ConnectionError):
                while taken < 8 * 2**20:
                    writer.write(bytes(65536))
                    await writer.drain()
                    taken += 65536
            await end_of(reader)
            assert taken < 8 * 2**20
            writer.close()
            small = await asked(
                address, post("Content-Length: 2", body=b"{}") + get("/health", "Connection: close")
            )
            assert b" 401 " in small and b" 200 OK" in small

    play(story)


def malformed(draw: random.Random) -> bytes:
    """A request that two parsers could read as two different ones, or none could read."""
    smuggled = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    kinds: list[Callable[[], bytes]] = [
        lambda: post(f"Content-Length: {draw.randrange(9)}", "Transfer-Encoding: chunked", body=smuggled),
        lambda: post("Transfer-Encoding: chunked", f"Content-Length: {draw.randrange(99)}", body=smuggled),
        lambda: post("Content-Length: 3", "Content-Length: 40", body=smuggled),
        lambda: post("Content-Length: 3, 40", body=smuggled),
        lambda: post(f"Content-Length: {draw.choice(['+3', '-1', '0x3', '3 3', '', '9' * 400, '1e1'])}"),
        lambda: post(f"Transfer-Encoding: {draw.choice(TRANSFERS)}", body=smuggled),
        lambda: post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=smuggled),
        lambda: post("Transfer-Encoding: chunked", body=draw.choice(CHUNKS)),
        lambda: post("Transfer-Encoding : chunked", body=smuggled),
        lambda: post(" Content-Length: 3", body=smuggled),
        lambda: get().replace(b"\r\n", b"\n"),
        lambda: get("/health", "X: a\nContent-Length: 5"),
        lambda: get("/health", "X: a\rContent-Length: 5"),
        lambda: get("/health", "X: a\0b"),
        lambda: get().replace(b"Host: localhost\r\n", draw.choice([b"", b"Host: a\r\nHost: b\r\n"])),
        lambda: get().replace(b"HTTP/1.1", draw.choice([b"HTTP/2.0", b"HTTP/1.1 x", b"", b"HTTP/11"])),
        lambda: get("/a b"),
        lambda: draw.randbytes(draw.randrange(1, 300)) + b"\r\n\r\n",
        lambda: b"\x16\x03\x01" + draw.randbytes(200) + b"\r\n\r\n",
        lambda: get("/health", "X: " + "a" * 200_000),
        lambda: post("Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0") + smuggled,
    ]
    return draw.choice(kinds)()


TRANSFERS = [
    "gzip", "chunked, gzip", "gzip, chunked", "xchunked", "chunked;q=1", "identity", "chunked, chunked",
]  # fmt: skip
CHUNKS = [
    b"x\r\n", b"-1\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"f" * 40 + b"\r\n", b"0x3\r\nabc", b"\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_what_is_no_http_is_refused_and_the_connection_closed(shared_play: Play, seed: int) -> None:
    draw = random.Random(seed)
    requests = [malformed(draw) for _ in range(40)]

    async def story(world: World) -> None:
        async with listening(world) as address:
            # What stands behind the request is never read as a second one.
            answers = await asyncio.gather(*(asked(address, raw + get()) for raw in requests))
            for raw, answer in zip(requests, answers, strict=True):
                assert answer[9:10] == b"4", (raw[:300], answer[:300])
                assert answer.count(b"HTTP/1.1 ") == 1 and b"\r\nconnection: close\r\n" in answer.lower(), (
                    raw[:300],
                    answer,
                )
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert await is_served(address)

    shared_play(story)


@pytest.mark.parametrize("length", [70, 256, 257, 5000])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/adapters"])
def test_long_boundaries_are_refused(shared_play: Play, path: str, length: int) -> None:
    edge = "b" * length
    body = f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--{edge}--\r\n'

    async def story(world: World) -> None:
        headers = {"content-type": f"multipart/form-data; boundary={edge}"}
        answer = await world.http.post(path, content=body.encode(), headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"]

    shared_play(story)


def test_a_client_that_has_gone_is_no_line_in_the_log_for_each_write(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """An application writes on until the loop has got to say that the connection is lost."""

    async def story(world: World) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            sent.set()
            await gone.wait()
            for _ in range(20):
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            ended.set()

        sent, gone, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        world.app = app
        async with listening(world) as address:
            client = socket.create_connection(address)
            client.sendall(get())
            await sent.wait()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.set()  # the application runs next, and the loop looks at its sockets after that
            client.close()  # with a reset
            await ended.wait()
        assert "socket.send() raised exception" not in caplog.text

    play(story)


def test_the_access_log_has_each_refusal_once(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """Refusals of connections, which never reach the application, and of what stands before its routes."""
    caplog.set_level(logging.INFO, "coserve.access")

    def told() -> list[tuple[str, str, int]]:
        found = [record.fields for record in caplog.records if record.name == "coserve.access"]  # type: ignore[attr-defined]
        caplog.clear()
        return [(one["method"], one["path"], one["status"]) for one in found]

    async def story(world: World) -> None:
        body = json.dumps(text()).encode()
        whole = post(f"Content-Length: {len(body)}", body=body)
        shedder = LoadShedder(world.state.queue, [TEXT])
        async with listening(world, shedder, logs_refused=True) as address:
            reply = await asked(address, b"GET / HTTP/1.1\nHost: localhost\n\n")
            assert (
                b" 400 " in reply and caplog.records[-1].getMessage().split("request=")[1] in reply.decode()
            )
            assert told() == [("-", "-", 400)]
            world.state.queue.check = refuse  # type: ignore[method-assign]
            assert b" 429 " in await asked(address, whole.replace(b"completions", b"completions?q=hidden", 1))
            assert told() == [("POST", TEXT, 429)]
            reader, writer = await asyncio.open_connection(*address)
            body_stops = asyncio.create_task(asked(address, post("Content-Length: 5000")))
            half = post("Content-Length: 5000").replace(TEXT.encode(), b"/v1/fine_tuning/jobs")
            half_comes = asyncio.create_task(asked(address, half))  # the application waits for the rest
            while not writer.is_closing() and not reader.at_eof():
                writer.write(b"G")
                await asyncio.sleep(0.05)
            assert (await body_stops).count(b"HTTP/1.1") == 1, "it has been answered before its body came"
            assert b" 408 " in await half_comes
            await world.until(lambda: len(caplog.records) > 2)
            by_connection, refused, half_way = sorted(told(), key=lambda one: one[1])
            assert by_connection == ("-", "-", 408) and half_way[:2] == ("POST", "/v1/fine_tuning/jobs")
            assert refused == ("POST", TEXT, 429)
        async with listening(world, logs_refused=True, most=2, stall_seconds=PATIENCE) as address:
            held = [await asyncio.open_connection(*address) for _ in range(2)]
            assert b" 503 " in await asked(address, get())
            assert told() == [("-", "-", 503)]
            for _, writer in held:
                writer.close()
        async with listening(world) as address:
            assert b" 400 " in await asked(address, b"GET / HTTP/1.1\n\n")
            assert not told(), "without an access log"
        statuses = [
            (await world.http.get("/v1/models", headers={"host": "evil.example"})).status_code,
            (await world.http.get("/v1/models", headers={"origin": "http://evil.example"})).status_code,
            (await world.http.post("/v1/files", headers={"content-length": str(10**12)})).status_code,
            (await world.http.get("/v1/models", headers={"x-long": "a" * 70_000})).status_code,
            *[(await world.http.get("/v1/models")).status_code for _ in range(3)],
        ]
        assert {*statuses} >= {403, 413, 429, 431}, statuses
        assert [one[2] for one in told()] == statuses

    def refuse(*_: int) -> None:
        raise ApiError(429, "The queue is full.")

    play(story, access_log=True, max_requests_minute=2)
