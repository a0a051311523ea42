"""Keys that another process revokes while answers are under way: these end, and nobody else's do."""

import asyncio
import json
import random
from typing import Any

import httpx2
import pytest

from coserve.serve import telemetry
from coserve.serve.http import revocation
from coserve.serve.http.auth import COOKIE
from coserve.serve.store.store import Store
from serving import Play, World, listening
from training import create

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


@pytest.mark.parametrize("seed", range(3))
def test_what_is_under_way_ends_with_its_key(play: Play, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming, waiting for a place or whole; those of other keys, of the same tenant too, go on."""
    draw = random.Random(seed)
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.05)

    async def story(world: World) -> None:
        made = [await world.state.store.tenants.create_key(name) for name in ("ann", "ann", "bob")]
        chosen, (gone, _) = draw.choice(list(enumerate(made)))

        async def ask(http: httpx2.AsyncClient, number: int) -> tuple[int, int, bool, bool, str]:
            path = PATHS[(number // 3 + seed) % 3]  # the first ones are answered, others wait
            stream = path == "/v1/messages" or draw.random() < 0.6
            text: Any = {"messages": [{"role": "user", "content": "x"}]}
            body = {"model": "tiny", "max_tokens": 150, "stream": stream, **text}
            key = made[number % 3][1]
            headers = {"authorization": f"Bearer {key}"}
            if path == "/v1/messages":
                headers = {"x-api-key": key}
            else:
                body["n"] = draw.choice((1, 2))
            if path == "/v1/completions":
                body["prompt"] = "x"
                del body["messages"]
            answer = await http.post(path, json=body, headers=headers)
            return number, answer.status_code, stream, path == "/v1/messages", answer.text

        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            asked = [asyncio.create_task(ask(http, number)) for number in range(9)]
            await world.until(lambda: world.engine.steps > 5 and world.state.queue.waiting > 0)
            assert not any(one.done() for one in asked)
            with Store(world.state.settings.state) as elsewhere:
                assert await elsewhere.tenants.revoke_key(gone.id)
            ours = [one for number, one in enumerate(asked) if number % 3 == chosen]
            for number, status, stream, of_anthropic, text in await asyncio.gather(*ours):
                assert number % 3 == chosen
                if status == 401:
                    last = text
                elif of_anthropic:
                    assert stream and status == 200
                    *_, last, rest = text.split("\n\n")
                    assert last.startswith("event: error\n") and not rest
                    last = last.removeprefix("event: error\ndata: ")
                else:
                    assert stream and status == 200
                    *_, last, done, rest = text.split("\n\n")
                    last = last.removeprefix("data: ")
                    assert (done, rest) == ("data: [DONE]", "")
                error = json.loads(last)["error"]
                assert error["type"] == "authentication_error" and "was revoked" in error["message"]
                assert of_anthropic or error["code"] == "key_revoked"
            others = [one for one in asked if one not in ours]
            assert not any(one.done() for one in others)
            world.engine.step_seconds = 0.0
            for _, status, stream, of_anthropic, text in await asyncio.gather(*others):
                assert status == 200 and "revoked" not in text
                end = 'data: {"type":"message_stop"}\n\n' if of_anthropic else "data: [DONE]\n\n"
                assert not stream or text.endswith(end)
            queue = world.state.queue
            await world.until(lambda: not (world.engine.running or queue.inside or queue.waiting))

    play(story, engine={"step_seconds": 0.02, "max_running": 4})


def test_what_is_watched_ends_with_what_let_it_in(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's figures and a job's, which go on for as long as these do: after a logout, after a login's
    week, and after the key's revocation."""
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)

    async def story(world: World) -> None:
        store = world.state.store
        key, secret = await store.tenants.create_key("ann")
        cookies = [await store.logins.begin(secret) or "" for _ in range(2)]
        job = await create(world, key=secret)
        begun = asyncio.Semaphore(0)

        async def watch(path: str, headers: dict[str, str]) -> str:
            async with http.stream("GET", path, headers=headers) as watched:
                lines = watched.aiter_lines()
                await anext(lines)
                begun.release()
                return "".join([line async for line in lines])

        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            name = f"{COOKIE}_{httpx2.URL(url).port}"
            given = [{"cookie": f"{name}={cookie}"} for cookie in cookies]
            given.append({"authorization": f"Bearer {secret}"})
            paths = ("/web/api/live", f"/v1/fine_tuning/jobs/{job.id}/live")
            tasks = [[asyncio.create_task(watch(path, one)) for path in paths] for one in given]
            for _ in range(6):
                await begun.acquire()
            await store.logins.end(cookies[0])
            assert all("logged_out" in told for told in await asyncio.gather(*tasks[0]))
            assert not any(one.done() for one in (*tasks[1], *tasks[2]))
            store.logins._clock = lambda: 2.0**32
            assert all("logged_out" in told for told in await asyncio.gather(*tasks[1]))
            assert not any(one.done() for one in tasks[2])
            await store.tenants.revoke_key(key.id)
            assert all("key_revoked" in told for told in await asyncio.gather(*tasks[2]))

    play(story)
