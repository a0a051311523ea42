"""Two servers behind nginx, with the configuration that docs/replicas.md has."""

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from documented import ROOT
from serving import SECONDS, World, listening, world

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None, reason="nginx is not installed: apt-get install nginx-light"
)
PAGE = ROOT / "docs" / "replicas.md"


@asynccontextmanager
async def proxied(folder: Path, servers: list[str]) -> AsyncIterator[str]:
    """Context with nginx in front of these servers; its address. What the page says is changed where it names
    addresses alone."""
    (text,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for number, url in enumerate(servers, 1):
        own = f"10.0.0.{number}:8000"
        assert text.count(own) == 1
        text = text.replace(own, url.removeprefix("http://"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert text.count("listen 8080;") == 1
    text = text.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    temporary = "".join(
        f"{part}_temp_path {folder};\n" for part in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{temporary}{text}}}\n"
    )
    with subprocess.Popen(["nginx", "-p", str(folder), "-c", str(file)]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_sessions_stay_and_no_request_is_lost_with_a_server(tmp_path: Path) -> None:
    async def story(a: World, b: World) -> None:
        worlds = (a, b)

        async def ask(http: httpx2.AsyncClient, session: str) -> int:
            """Asks in a session; returns the place of the server that answered."""
            before = [len(it.submits()) for it in worlds]
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            while True:  # nginx may not listen yet
                try:
                    reply = await http.post("/v1/completions", json=body, headers={"x-session-id": session})
                    break
                except httpx2.ConnectError:
                    await asyncio.sleep(0.02)
            assert reply.status_code == 200, reply.text
            (place,) = [n for n, it in enumerate(worlds) if len(it.submits()) > before[n]]
            return place

        async with (
            AsyncExitStack() as stack,
            listening(b.app) as second,
            proxied(tmp_path, [await stack.enter_async_context(listening(a.app)), second]) as url,
            httpx2.AsyncClient(base_url=url) as http,
        ):
            sessions = [f"session-{number}" for number in range(12)]
            places = {one: await ask(http, one) for one in sessions}
            assert set(places.values()) == {0, 1}
            assert {one: await ask(http, one) for one in sessions} == places
            body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                assert "text/event-stream" in reply.headers["content-type"]
                assert (await reply.aread()).rstrip().endswith(b"data: [DONE]")
            of_first = [one for one in sessions if places[one] == 0]
            a.state.draining = True
            assert await ask(http, of_first[0]) == 1, "what a server that drains refuses goes elsewhere"
            await stack.aclose()  # nobody listens there any more
            assert {await ask(http, one) for one in of_first} == {1}

    async def whole() -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        async with (
            asyncio.timeout(SECONDS),
            world(tmp_path / "a", {}, {}) as a,
            world(tmp_path / "b", {}, {}) as b,
        ):
            await story(a, b)

    asyncio.run(whole())
