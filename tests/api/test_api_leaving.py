"""Clients that leave: their work ends within a step, streaming or not, waiting or running."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from coserve.errors import EngineLost
from coserve.wire.messages import Cancel
from serving import SECONDS, Play, World, listening

BODY: Any = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "seed": 1}


async def leave(asked: "asyncio.Task[Any]") -> None:
    """As a client does that has lost its patience: the connection is closed."""
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


def is_idle(world: World) -> bool:
    queue = world.state.queue
    return not (world.engine.running or world.state.link.live or queue.inside or queue.waiting)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_work_within_a_step(play: Play, stream: bool, count: int) -> None:
    async def read_some(http: httpx2.AsyncClient) -> None:
        async with http.stream(
            "POST", "/v1/completions", json={**BODY, "n": count, "stream": True}
        ) as answer:
            lines = answer.aiter_lines()
            for _ in range(6):
                await anext(lines)

    async def story(world: World) -> None:
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=SECONDS) as http:
            if stream:
                await read_some(http)
            else:
                asked = asyncio.create_task(http.post("/v1/completions", json={**BODY, "n": count}))
                await world.until(lambda: world.engine.steps > 3 and len(world.engine.running) == count)
                await leave(asked)
            steps = world.engine.steps
            await world.until(lambda: not world.engine.running)
            assert steps > 0 and world.engine.steps <= steps + 2 and len(_cancels(world)) == count
            await world.until(lambda: is_idle(world))

    play(story, engine={"step_seconds": 0.03})


def _cancels(world: World) -> list[Cancel]:
    return [command for command in world.engine.said if isinstance(command, Cancel)]


def test_who_leaves_the_queue_never_reaches_the_engine(play: Play) -> None:
    async def story(world: World) -> None:
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=SECONDS) as http:
            async with http.stream("POST", "/v1/completions", json={**BODY, "n": 2, "stream": True}):
                before = world.state.queue.waiting
                asked = asyncio.create_task(http.post("/v1/completions", json={**BODY, "prompt": [99, 98]}))
                await world.until(lambda: world.state.queue.waiting > before)
                await leave(asked)
                await world.until(lambda: world.state.queue.waiting == 0)
            await world.until(lambda: is_idle(world))
            assert all(sent.prompt != (99, 98) for sent in world.submits())

    play(story, engine={"step_seconds": 0.02, "max_running": 1})


def test_an_engine_that_refuses_in_the_middle_is_an_event_of_the_stream(play: Play) -> None:
    async def story(world: World) -> None:
        task = asyncio.create_task(
            world.http.post("/v1/completions", json={**BODY, "stream": True, "max_tokens": 500})
        )
        await world.until(lambda: world.engine.steps > 5)
        world.state.link._give_up(EngineLost("gone"))
        answer = await task
        events = answer.text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert events[-2] == "data: [DONE]" and answer.status_code == 200

    play(story, engine={"step_seconds": 0.01})


def test_an_engine_that_refuses_at_once_is_a_status(play: Play) -> None:
    async def story(world: World) -> None:
        await world.engine.die()
        await world.until(lambda: not world.state.link.ready)
        task = asyncio.create_task(world.http.post("/v1/completions", json={**BODY, "stream": True}))
        await world.until(lambda: world.state.link.live)
        world.state.link._give_up(EngineLost("gone"))
        answer = await task
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "engine_lost"

    play(story)
