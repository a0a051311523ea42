"""The API's process as its supervisor runs it: orders, status lines, SIGTERM, kill -9."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2

from api_process import served
from coserve import tiny
from coserve.serve.settings import ServerSettings
from coserve.wire.messages import Drain
from fake_engine import FakeEngine
from growing_data import readers, slow_file
from waiting import until

BODY: Any = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 1}
PATIENCE = 90.0  # seconds; only a hang takes so long


def test_a_process_serves_survives_kill_9_and_drains(tmp_path: Path) -> None:
    settings = ServerSettings(model=str(tiny.path()), state=tmp_path, name="tiny", drain_seconds=10.0)

    async def story() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        fake = FakeEngine(settings.socket, step_seconds=0.01)
        async with asyncio.timeout(PATIENCE), fake:
            async with served(settings, listener) as first:
                assert (await first.status())["state"] == "ready"
                async with httpx2.AsyncClient(base_url=first.url, timeout=PATIENCE) as http:
                    whole = (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
                    lost = asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 900}))
                    await until(lambda: fake.running)
                    os.kill(first.process.pid, signal.SIGKILL)
                    await asyncio.gather(lost, return_exceptions=True)
                await until(lambda: not fake.running)  # its requests were cancelled with its connection
            async with served(settings, listener) as second:
                async with httpx2.AsyncClient(base_url=second.url, timeout=PATIENCE) as http:
                    # The supervisor's socket takes connections while nobody serves them yet.
                    assert (await http.post("/v1/completions", json=BODY)).json()["choices"][0][
                        "text"
                    ] == whole
                    assert (await second.status())["state"] == "ready"
                    running = asyncio.create_task(http.post("/v1/completions", json=BODY))
                    await until(lambda: fake.running)
                    second.process.terminate()
                    assert (await second.status())["state"] == "draining"
                    refused = await http.post("/v1/completions", json=BODY)
                    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
                    assert (await running).json()["choices"][0]["text"] == whole
                assert await second.process.wait() == 0
            assert fake.said[-1] == Drain()

    asyncio.run(story())


def test_what_takes_too_long_ends_with_the_drain(tmp_path: Path) -> None:
    """Answers, and the reading of an upload. A server whose engine is not there does not wait for it."""
    settings = ServerSettings(model=str(tiny.path()), state=tmp_path, name="tiny", drain_seconds=0.1)

    async def story() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        fake = FakeEngine(settings.socket, step_seconds=0.1)
        async with (
            asyncio.timeout(PATIENCE),
            served(settings, listener) as server,
            fake,
            httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE) as http,
        ):
            assert (await server.status())["state"] == "ready"
            endless = {**BODY, "max_tokens": 2000}
            asked = [asyncio.create_task(http.post("/v1/completions", json=endless)) for _ in range(40)]
            await until(lambda: len(fake.running) >= fake.max_running)
            form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", slow_file())}}
            sent = asyncio.create_task(http.post("/v1/files", **form))
            await until(lambda: any(readers(server.process.pid)))
            server.process.terminate()
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {503}
            assert "shutting down" in answers[0].text
            assert await server.process.wait() == 0
            await asyncio.gather(sent, return_exceptions=True)
            assert sent.exception() is not None or sent.result().is_error
            assert not fake.running and fake.said[-1] == Drain()
        async with asyncio.timeout(40), served(settings, listener) as lonely:  # 45 s for an engine
            assert (await lonely.status())["state"] == "ready"
            lonely.process.terminate()
            assert await lonely.process.wait() == 0

    asyncio.run(story())


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path: Path) -> None:
    settings = ServerSettings(model=str(tmp_path / "nothing"), state=tmp_path / "state")
    settings.state.mkdir()

    async def story() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with asyncio.timeout(PATIENCE), served(settings, listener) as server:
            status = await server.status()
            assert status["state"] == "failed" and status["kind"] == "ConfigError" and status["text"]
            assert await server.process.wait() == 1

    asyncio.run(story())
