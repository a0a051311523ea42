"""Hostile requests for responses, conversations and stored completions: each gets one clear error, and nobody
else notices."""

import asyncio
import json
import os
import random
import secrets
from typing import Any

import httpx2
import pytest
from asked import Generator
from sqlalchemy import func, select

from coserve.serve.http import revocation
from coserve.serve.store.records import ConversationRecord, ItemRecord, ResponseRecord, StoredChat
from coserve.serve.store.store import Store
from serving import Play, World, listening

PATHS = ("/v1/responses", "/v1/conversations", "/v1/chat/completions")
KINDS = (ResponseRecord, ConversationRecord, ItemRecord, StoredChat)
CASES = int(os.environ.get("COSERVE_CASES", "150"))  # beside one for each value of each body


async def owned(world: World, key: str) -> dict[str, list[str]]:
    """Ids of a tenant's own things, by the names of parameters."""
    headers = {"authorization": f"Bearer {key}"}

    async def post(path: str, **body: Any) -> Any:
        answer = await world.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    said: Any = [{"role": "user", "content": "x"}]
    first = await post("/v1/responses", model="tiny", input="x", max_output_tokens=2)
    second = await post(
        "/v1/responses", model="tiny", input="x", max_output_tokens=2, previous_response_id=first["id"]
    )
    conversation = (await post("/v1/conversations", items=said))["id"]
    listed = await world.http.get(f"/v1/conversations/{conversation}/items", headers=headers)
    chat = await post("/v1/chat/completions", model="tiny", messages=said, max_tokens=2, store=True)
    ids = [first["id"], second["id"]]
    return {
        "response_id": ids, "previous_response_id": ids, "conversation": [conversation],
        "conversation_id": [conversation], "item_id": [listed.json()["data"][0]["id"]],
        "completion_id": [chat["id"]], "model": ["tiny"], "after": ids, "store": [True],
    }  # fmt: skip


async def counted(world: World, tenant: str) -> list[int]:
    """Rows of a tenant, by kind."""
    found = []
    for kind in KINDS:
        wanted = select(func.count()).where(kind.__table__.c.tenant == tenant)
        found.append(await world.state.store._database.read(lambda session: session.scalar(wanted)))  # noqa: B023
    return found


def test_each_request_gets_an_answer_and_changes_nothing_of_others(play: Play) -> None:
    """Extreme values at every place of every body and query, with ids of one's own and of another tenant."""
    seed = int(os.environ.get("COSERVE_SEED", secrets.randbits(32)))
    print(f"COSERVE_SEED={seed}")
    draw = random.Random(seed)

    async def story(world: World) -> None:
        tenants = world.state.store.tenants
        ann, bob = [(await tenants.create_key(name))[1] for name in ("ann", "bob")]
        world.say("b")
        theirs = await owned(world, bob)
        ids = {one.name: one.id for one in await tenants.list()}
        before = await counted(world, ids["bob"])
        assert all(before)
        ours = await owned(world, ann)
        known: dict[str, list[Any]] = {name: [*ours[name], *theirs[name]] for name in ours}
        generator = Generator(world.app, draw, known)
        generator.routes = [one for one in generator.routes if one.path.startswith(PATHS)]
        assert len(generator.routes) > 20
        cases = [*generator.each(), *(generator.any() for _ in range(CASES))]
        headers = {"authorization": f"Bearer {ann}", "content-type": "application/json"}
        statuses = set[int]()
        for case in cases:
            answer = await world.http.request(case.method, case.path, content=case.body, headers=headers)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case.what, answer.text[:500])
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and error["type"] and len(answer.content) < 10_000, case.what
        assert {200, 400, 404} <= statuses
        assert await counted(world, ids["bob"]) == before
        for name, path in (
            ("response_id", "/v1/responses"),
            ("conversation_id", "/v1/conversations"),
            ("completion_id", "/v1/chat/completions"),
        ):
            for id in theirs[name]:
                for key, status in ((bob, 200), (ann, 404)):
                    answer = await world.http.get(f"{path}/{id}", headers={"authorization": f"Bearer {key}"})
                    assert answer.status_code == status

    play(story, ignore_hosted_tools=draw.random() < 0.5)


@pytest.mark.parametrize("is_stored", [True, False])
def test_streams_that_are_cut_off_leave_nothing(play: Play, is_stored: bool) -> None:
    """At any event; those in the background go on, and those that follow them leave as they like."""
    draw = random.Random(5)

    async def story(world: World) -> None:
        world.say("Hello", ends=False)
        body: dict[str, Any] = {"model": "tiny", "input": "x", "max_output_tokens": 1000, "store": is_stored}
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:

            async def cut(number: int, **more: Any) -> None:
                sent = {**body, **more, "stream": True}
                async with http.stream("POST", "/v1/responses", json=sent) as answer:
                    events = 0
                    async for line in answer.aiter_lines():
                        events += line.startswith("event:")
                        if events > number:
                            break

            await asyncio.gather(*(cut(draw.randrange(20)) for _ in range(8)))
            await world.until(lambda: not world.engine.running and not world.state.queue.inside)
            kept = ResponseRecord.__table__
            count = select(func.count()).select_from(kept)
            assert not await world.state.store._database.read(lambda session: session.scalar(count))
            if is_stored:
                await asyncio.gather(*(cut(number, background=True) for number in range(3)))
                rows = await world.state.store.responses.unfinished()
                assert len(rows) == 3
                world.say("Bye.")
                for row in rows:
                    await http.get(f"/v1/responses/{row.id}?stream=true")
                    assert (await http.get(f"/v1/responses/{row.id}")).json()["status"] == "completed"

    play(story)


def test_a_stream_ends_with_its_key(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "LOOK_SECONDS", 0.05)

    async def story(world: World) -> None:
        made = [await world.state.store.tenants.create_key("ann") for _ in range(2)]
        world.say("Hello", ends=False)
        body = {"model": "tiny", "input": "x", "max_output_tokens": 1500, "stream": True}

        async def ask(key: str) -> httpx2.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await world.http.post("/v1/responses", json=body, headers=headers)

        asked = [asyncio.create_task(ask(key)) for _, key in made]
        await world.until(lambda: len(world.engine.running) == 2)
        with Store(world.state.settings.state) as elsewhere:
            assert await elsewhere.tenants.revoke_key(made[0][0].id)
        gone = await asked[0]
        last = gone.text if gone.status_code == 401 else gone.text.split("\n\n")[-3].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "key_revoked"
        world.say("Bye.")
        assert '"type":"response.completed"' in (await asked[1]).text

    play(story)


def test_a_long_line_of_responses_is_refused_at_its_bound(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And branches of one do not take what is the others'."""
    from coserve.serve.store import responses

    monkeypatch.setattr(responses, "MOST_EARLIER", 10)

    async def story(world: World) -> None:
        world.say("b")
        body: dict[str, Any] = {"model": "tiny", "input": "x", "max_output_tokens": 2}
        ids = list[str]()
        while True:
            more = {"previous_response_id": ids[-1]} if ids else {}
            answer = await world.http.post("/v1/responses", json={**body, **more})
            if answer.status_code != 200:
                break
            ids.append(answer.json()["id"])
        assert answer.json()["error"]["code"] == "context_length_exceeded" and len(ids) == 6
        more = {"previous_response_id": ids[0]}
        assert (await world.http.post("/v1/responses", json={**body, **more})).status_code == 200

    play(story)
