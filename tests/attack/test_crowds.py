"""Many clients at once: those beyond what may run and wait hear so at once, not after the others' turn."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import crowd
import httpx2
import pytest

from coserve.serve.app import STREAMED, error_shape_of
from coserve.serve.http.connections import ConnectionLimits
from coserve.serve.http.listener import Listener
from coserve.serve.http.shedding import LoadShedder
from hostile_bodies import MESSAGES, TEXT, chat, text
from serving import Play, World
from whole_server import PATIENCE, Server, until

COUNT = 640
# The floor: uvicorn with an application that answers 429 to everything, and does nothing else.
BARE = """
import asyncio, socket, sys, uvicorn
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})
config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False)
asyncio.run(uvicorn.Server(config).serve([socket.socket(fileno=int(sys.argv[1]))]))
"""


@pytest.mark.parametrize("seed", range(3))
def test_refusals_do_not_wait_for_what_is_accepted(play: Play, seed: int) -> None:
    draw = random.Random(seed)
    accepted, refused = draw.randint(20, 40), draw.randint(20, 60)

    async def story(world: World) -> None:
        encode, events = world.state.text.encode, list[str]()

        def noted(prompt: str) -> tuple[int, ...]:
            events.append("prepared")
            return encode(prompt)

        world.state.text.encode = noted  # type: ignore[method-assign]

        async def ask() -> None:
            answer = await world.http.post(TEXT, json=text(prompt="x " * draw.randint(1, 50), max_tokens=1))
            if answer.status_code == 429:
                events.append("refused")

        await asyncio.gather(*(ask() for _ in range(accepted + refused)))
        assert events.count("refused") == refused and events.count("prepared") == accepted
        last = len(events) - events[::-1].index("refused")
        assert events[:last].count("prepared") <= accepted / 2

    play(story, engine={"max_running": 1, "step_seconds": 0.001}, max_queue_tenant=accepted - 2)


@pytest.mark.parametrize(
    ("path", "key", "other"),
    [
        (TEXT, "Authorization: Bearer a", "Authorization: Bearer x"),
        (MESSAGES, "x-api-key: a", "x-api-key: x"),
    ],
    ids=["openai", "anthropic"],
)
def test_what_is_there_as_a_whole_is_refused_before_the_application(
    play: Play, path: str, key: str, other: str
) -> None:
    """And nothing else is: who still sends, who asks for something else, another key, a browser's page."""
    asks = chat if path == MESSAGES else text
    body = json.dumps(asks(max_tokens=200)).encode()

    async def story(world: World) -> None:
        asked = list[str]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["path"])
            await world.app(scope, receive, send)

        shedder = LoadShedder(world.state.queue, STREAMED)
        async with _listening(app, shedder) as address:

            async def send(raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(raw)
                return reader, writer

            def post(body: bytes, *headers: str) -> bytes:
                return _post(f"{path}?beta=true", body, *(headers or (key,)))

            running = [await send(post(body)) for _ in range(6)]
            await world.until(lambda: world.state.queue.waiting == 4)
            asked.clear()
            reader, _ = await send(post(body))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 429 ") and b"onnection: close" in answer and not asked
            assert b"retry-after: " in answer.lower() and b"x-request-id: req_" in answer
            told = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert told["error"]["type"] == "rate_limit_error"
            assert ("request_id" in told) is (b"\r\nrequest-id: req_" in answer) is (path == MESSAGES)

            for raw in (post(body)[:-5], post(body, key, "Origin: http://localhost"), post(body, other)):
                asked.clear()
                reader, writer = await send(raw)
                assert (await reader.readline())[9:12] == b"429" and asked, raw
                writer.close()
            for _, writer in running:
                writer.close()
            await world.until(lambda: not shedder._in_flight)
            await world.until(lambda: not world.state.queue.inside)
            reader, writer = await send(post(json.dumps(asks(max_tokens=1)).encode()))
            assert (await reader.readline())[9:12] == b"200"
            writer.close()

    play(story, engine={"max_running": 1, "step_seconds": 0.02}, max_queue_tenant=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["open", "fresh"])
def test_640_clients_at_once(tmp_path: Path, kind: str) -> None:
    """Prints how long refusals took, and what uvicorn alone needs for them; COSERVE_CROWDS times."""
    rounds, ours, floor = int(os.environ.get("COSERVE_CROWDS", "5")), list[float](), list[float]()
    server = Server(tmp_path)
    try:
        pid = server.pid_of("coserve.serve.main")
        host, port = server.url.removeprefix("http://").split(":")
        with _bare() as (bare, bare_port):
            for number in range(rounds + 1):
                for where, who, times in ((port, pid, ours), (bare_port, bare, floor)):
                    told = _crowd(host, where, who, kind)
                    if number:  # what is built with the first request
                        times.append(told["processor"])
                        _print("coserve" if times is ours else "uvicorn", kind, told)
                until(lambda: _is_idle(server), "idle")
    finally:
        server.end()
    ratio = median(ours) / median(floor)
    print(
        f"processor time until the last refusal, {kind}: {median(ours):.3f} s, {ratio:.2f} of uvicorn's alone"
    )
    assert ratio < 1.5


def _is_idle(server: Server) -> bool:
    """Tells whether no request runs or waits. A client that has gone is noticed within a step."""
    lines = httpx2.get(f"{server.url}/metrics", timeout=PATIENCE).text.splitlines()
    kinds = ("coserve_num_requests_running", "coserve_num_requests_waiting")
    found = [float(line.split()[-1]) for line in lines if line.startswith(kinds)]
    return len(found) == 2 and not any(found)


def _crowd(host: str, port: object, pid: int, kind: str) -> dict[str, Any]:
    body = json.dumps(text(model="coserve-tiny", max_tokens=60))
    command = [sys.executable, crowd.__file__, host, str(port), str(COUNT), str(pid), kind, body]
    done = subprocess.run(command, capture_output=True, check=True, timeout=2 * PATIENCE)
    return dict(json.loads(done.stdout))


def _print(whose: str, kind: str, told: dict[str, Any]) -> None:
    refused = [row for row in told["rows"] if row[0] in ("429", "503")]
    assert refused and {row[0] for row in told["rows"]} <= {"200", "429", "503"}
    connect, first, since = zip(*(row[1:] for row in refused), strict=True)
    print(
        f"{whose}, {kind}: {len(refused)} of {COUNT} refused; to the first byte median {median(first):.3f}, "
        f"99 % {quantiles(first, n=100)[-1]:.3f}, max {max(first):.3f} s; connect max {max(connect):.3f} s; "
        f"last refusal {max(since):.3f} s after the first request, {told['processor']:.3f} s of processor "
        f"time; load {os.getloadavg()[0]:.1f}"
    )


@asynccontextmanager
async def _listening(app: Any, shedder: LoadShedder) -> AsyncIterator[tuple[str, int]]:
    """The application behind a real socket; its address."""
    own = socket.create_server(("127.0.0.1", 0))
    server = Listener(app, own, ConnectionLimits(), shedder, error_shape_of)
    task = asyncio.create_task(server.run())
    try:
        await server.started()
        yield server._socket.getsockname()
    finally:
        server.stop()
        await task


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@contextmanager
def _bare() -> Iterator[tuple[int, int]]:
    """(process, port) of a uvicorn that refuses everything."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    number = listener.fileno()
    process = subprocess.Popen([sys.executable, "-c", BARE, str(number)], pass_fds=(number,))
    try:
        yield process.pid, listener.getsockname()[1]
    finally:
        process.kill()
        process.wait()
        listener.close()
