"""The server over a real engine with the embedded model, which is killed in the middle of its answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coserve import tiny
from coserve.serve.app import create_app
from coserve.serve.compose import build_state
from coserve.serve.settings import ServerSettings
from engine_process import EngineProcess

PATIENCE = 300.0  # seconds: imports take a minute on a machine that is busy
STORY: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 1},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_answers_go_on_in_the_next_engine_as_if_nothing_had_happened(tmp_path: Path) -> None:
    settings = ServerSettings(model=str(tiny.path()), state=tmp_path / "state", name="tiny")
    settings.state.mkdir()

    async def story() -> None:
        engine = await start(tmp_path)
        try:
            async with asyncio.timeout(PATIENCE), build_state(settings, tmp_path / "engine.sock") as state:
                await state.link.wait_ready(PATIENCE)
                transport = httpx2.ASGITransport(app=create_app(state))
                async with httpx2.AsyncClient(
                    transport=transport, base_url="http://localhost", timeout=PATIENCE
                ) as http:
                    await check_grammar(http)
                    calm = await asyncio.gather(*(tokens(http, seed) for seed in range(6)))
                    again = [asyncio.create_task(tokens(http, seed)) for seed in range(6)]
                    while sum(len(live.tokens) for live in state.link.live.values()) < 200:
                        await asyncio.sleep(0.002)
                    engine.process.kill()
                    await asyncio.to_thread(engine.process.wait)
                    engine = await start(tmp_path)
                    assert await asyncio.gather(*again) == calm and {len(one) for one in calm} == {120}
                    assert state.link.connections == 2
        finally:
            engine.process.kill()
            engine.process.wait()

    asyncio.run(story())


async def start(folder: Path) -> EngineProcess:
    engine = EngineProcess(folder, deterministic=True)
    engine.feed(tiny.path())
    assert [(await asyncio.to_thread(engine.phase)).state for _ in range(3)][-1] == "ready"
    return engine


async def tokens(http: httpx2.AsyncClient, seed: int) -> list[int]:
    body = {**STORY, "max_tokens": 120, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    found = (await http.post("/v1/chat/completions", json=body)).json()
    return list(found["choices"][0]["token_ids"])


async def check_grammar(http: httpx2.AsyncClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = (await http.post("/v1/chat/completions", json={**STORY, "response_format": form})).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert set(found) == {"name", "age"} and 1 <= found["age"] <= 99
