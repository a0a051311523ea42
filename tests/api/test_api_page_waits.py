"""A tenant's own part of the page's samples: why its requests wait, and what it holds in the engine."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from coserve.serve import telemetry
from coserve.serve.answering.waits import MOST_SHOWN
from coserve.serve.store.records import Adapter
from coserve.wire.messages import Holdings
from serving import Play, World, listening


@pytest.fixture(autouse=True)
def samples_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)


async def mine(http: httpx2.AsyncClient, key: str, count: int = 1) -> dict[str, Any]:
    """A tenant's own figures, as the message of that number has them."""
    async with http.stream("GET", "/web/api/live", headers={"authorization": f"Bearer {key}"}) as stream:
        told = []
        async for line in stream.aiter_lines():
            if line:
                told.append(json.loads(line.removeprefix("data: ")))
            if len(told) == count:
                return dict(told[-1]["mine"])
    raise AssertionError("the stream ended")


def test_each_request_tells_its_tenant_alone_why_it_waits(play: Play) -> None:
    async def story(world: World) -> None:
        keys = {name: (await world.state.store.tenants.create_key(name))[1] for name in ("ann", "bob")}
        given = {"authorization": f"Bearer {keys['ann']}"}
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 400}
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            await world.until(lambda: world.state.link.stats is not None)
            world.engine.hangs = True
            tasks = [
                asyncio.create_task(http.post("/v1/completions", json=ask, headers=given))
                for _ in range(MOST_SHOWN + 8)
            ]
            await world.until(lambda: world.state.queue.waiting + world.state.queue.inside == len(tasks))
            places = world.state.queue.inside
            await world.until(lambda: len(world.submits()) == places)
            inside = [request.id for request in world.submits()]
            assert world.state.link.stats is not None
            holdings = Holdings(waits={inside[0]: "it needs 9 pages, and 2 are free"})
            world.state.link.stats = replace(world.state.link.stats, holdings=holdings)
            ann, bob = await mine(http, keys["ann"]), await mine(http, keys["bob"])
            assert bob["waits"] == [] and bob["waiting"] == 0
            rows = ann["waits"]
            assert len(rows) == MOST_SHOWN and ann["waiting"] == len(tasks) - places
            why = {row["id"]: row["why"] for row in rows}
            assert why[inside[0]] == "it needs 9 pages, and 2 are free"
            assert why[inside[1]] == "the engine reads its prompt"
            queued = [row["why"] for row in rows if row["id"] not in inside]
            assert queued[0].startswith("place 1 of your queue: ") and "places" in queued[0]
            assert all(row["model"] == "tiny" and row["prompt"] > 0 and row["seconds"] >= 0 for row in rows)
            world.engine.hangs = False
            await world.engine.die()
            await world.until(lambda: not world.state.link.ready)
            assert "ended" in (await mine(http, keys["ann"]))["waits"][0]["why"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await world.until(lambda: not world.state.waits._waiting)

    play(story, engine={"max_running": 4})


def test_an_answer_that_has_a_token_waits_no_longer(play: Play) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True}
        async with (
            listening(world.app) as url,
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if "text" in line:
                    break
            assert world.state.queue.inside == 1 and not world.state.waits._waiting
        await world.until(lambda: not world.state.queue.inside)

    play(story, engine={"step_seconds": 0.02})


def test_memory_is_told_by_owner_and_of_others_in_sums(play: Play) -> None:
    async def story(world: World) -> None:
        store, keys, ids = world.state.store, dict[str, str](), dict[str, str]()
        for name in ("ann", "bob"):
            _, keys[name] = await store.tenants.create_key(name)
            owner = await store.tenants.of_key(keys[name])
            assert owner is not None
            ids[name], folder = owner.id, store.folder / "adapters" / name
            await store.adapters.add(Adapter(f"adapter-{name}", f"of {name}", folder, "tiny", 1, owner.id))
        await store.adapters.add(Adapter("adapter-all", "for all", store.folder / "x", "tiny", 1))
        await world.until(lambda: world.state.link.stats is not None)
        world.engine.hangs = True
        assert world.state.link.stats is not None
        holdings = Holdings(
            pages={f"{ids['ann']}/salt": 3, f"{ids['bob']}/": 5},
            adapters={"adapter-ann": 10, "adapter-bob": 70, "adapter-all": 7, "unknown": 1},
            jobs={"ftjob-nobody": 9},
        )
        world.state.link.stats = replace(world.state.link.stats, holdings=holdings)
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:
            held = (await mine(http, keys["ann"], 4))["holds"]
            assert held["pages"] == 3 and held["jobs"] == {"own": [], "more": 0, "others": 9}
            assert held["adapters"]["own"] == [["adapter-ann", "of ann", 10], ["adapter-all", "for all", 7]]
            assert held["adapters"]["others"] == 71
            told = await mine(http, keys["bob"], 4)
            assert told["holds"]["pages"] == 5 and "ann" not in json.dumps(told)
        world.engine.hangs = False

    play(story)
