"""Hostile requests for messages, batches, uploads, evals, graders, embeddings and tokens: each gets one clear
error in the form of its dialect, and nobody else notices."""

import asyncio
import json
import os
import random
import secrets
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest
from asked import Generator
from sqlalchemy import func, select

from coserve.serve.store.records import (
    BatchRecord,
    EvalItemRecord,
    EvalRecord,
    EvalRunRecord,
    File,
    UploadRecord,
)
from serving import Play, World, listening

PATHS = (
    "/v1/messages", "/v1/batches", "/v1/uploads", "/v1/evals", "/v1/fine_tuning/alpha", "/v1/embeddings",
    "/tokenize", "/detokenize",
)  # fmt: skip
KINDS = (BatchRecord, UploadRecord, EvalRecord, EvalRunRecord, EvalItemRecord, File)
CASES = int(os.environ.get("COSERVE_CASES", "15"))
SAID: Any = [{"role": "user", "content": "x"}]
OURS = {"model": "tiny", "max_tokens": 2, "messages": SAID}
ENDED = ("completed", "ended")


async def owned(world: World, key: str) -> dict[str, list[Any]]:
    """Ids of a tenant's own things, by the names of parameters, once what runs has ended."""
    headers = {"authorization": f"Bearer {key}"}

    async def post(path: str, **body: Any) -> Any:
        answer = await world.http.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()

    async def ended(path: str) -> Any:
        async with asyncio.timeout(60):
            while True:
                found = (await world.http.get(path, headers=headers)).json()
                if found.get("status", found.get("processing_status")) in ENDED:
                    return found
                await asyncio.sleep(0.01)

    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": OURS}
    uploaded = await world.http.post(
        "/v1/files", headers=headers, data={"purpose": "batch"},
        files={"file": ("a.jsonl", json.dumps(line).encode())},
    )  # fmt: skip
    file = uploaded.json()["id"]
    batch = await post(
        "/v1/batches", input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h"
    )
    messages = await post("/v1/messages/batches", requests=[{"custom_id": "a", "params": OURS}])
    upload = await post("/v1/uploads", bytes=9, filename="a.jsonl", mime_type="text/plain", purpose="batch")
    criterion = {
        "type": "string_check", "name": "a", "operation": "eq", "input": "{{item.a}}", "reference": "b",
    }  # fmt: skip
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    made = await post(
        "/v1/evals",
        data_source_config={"type": "custom", "item_schema": schema},
        testing_criteria=[criterion],
    )
    content = {"type": "file_content", "content": [{"item": {"a": "b"}}]}
    runs = f"/v1/evals/{made['id']}/runs"
    run = await post(runs, data_source={"type": "jsonl", "source": content})
    await asyncio.gather(
        ended(f"/v1/batches/{batch['id']}"), ended(f"/v1/messages/batches/{messages['id']}"),
        ended(f"{runs}/{run['id']}"),
    )  # fmt: skip
    outcomes = (await world.http.get(f"{runs}/{run['id']}/output_items", headers=headers)).json()["data"]
    return {
        "batch_id": [batch["id"], messages["id"]], "upload_id": [upload["id"]], "eval_id": [made["id"]],
        "run_id": [run["id"]], "item_id": [outcomes[0]["id"]], "input_file_id": [file],
        "after": [batch["id"], made["id"]], "after_id": [messages["id"]], "before_id": [messages["id"]],
        "model": ["tiny"], "messages": [SAID],
    }  # fmt: skip


async def counted(world: World, tenant: str) -> list[int]:
    """Rows of a tenant, by kind."""
    found = []
    for kind in KINDS:
        wanted = select(func.count()).where(kind.__table__.c.tenant == tenant)
        found.append(await world.state.store._database.read(lambda session: session.scalar(wanted)))  # noqa: B023
    return found


async def seen(world: World, ids: Mapping[str, list[Any]], key: str) -> list[int]:
    """Statuses of reads of a tenant's things."""
    batch, messages = ids["batch_id"]
    runs = f"/v1/evals/{ids['eval_id'][0]}/runs"
    paths = (
        f"/v1/batches/{batch}", f"/v1/messages/batches/{messages}",
        f"/v1/messages/batches/{messages}/results", f"/v1/evals/{ids['eval_id'][0]}",
        f"{runs}/{ids['run_id'][0]}", f"{runs}/{ids['run_id'][0]}/output_items",
        f"/v1/files/{ids['input_file_id'][0]}",
    )  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    return [(await world.http.get(path, headers=headers)).status_code for path in paths]


async def attack(world: World, draw: random.Random, count: int, every: bool) -> None:
    """Extreme values at places of bodies and queries, with ids of one's own and of another tenant."""
    tenants = world.state.store.tenants
    ann, bob = [(await tenants.create_key(name))[1] for name in ("ann", "bob")]
    world.say("b")
    theirs, ours = await owned(world, bob), await owned(world, ann)
    ids = {one.name: one.id for one in await tenants.list()}
    before = await counted(world, ids["bob"])
    assert all(before)
    generator = Generator(world.app, draw, {name: [*ours[name], *theirs[name]] for name in ours})
    generator.routes = [one for one in generator.routes if one.path.startswith(PATHS)]
    assert len(generator.routes) > 25
    cases = [*(generator.each() if every else ()), *(generator.any() for _ in range(count))]
    headers = {"authorization": f"Bearer {ann}", "content-type": "application/json"}
    statuses = set[int]()
    for case in cases:
        answer = await world.http.request(case.method, case.path, content=case.body, headers=headers)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (case.what, answer.text[:500])
        if answer.status_code >= 400:
            told = answer.json()
            assert told["error"]["message"] and told["error"]["type"] and len(answer.content) < 10_000, (
                case.what
            )
            assert (told.get("type") == "error") == case.path.startswith("/v1/messages"), case.what
    assert {200, 400, 404} <= statuses
    assert await counted(world, ids["bob"]) == before
    assert set(await seen(world, theirs, bob)) == {200} and set(await seen(world, theirs, ann)) == {404}


def draws() -> random.Random:
    seed = int(os.environ.get("COSERVE_SEED", secrets.randbits(32)))
    print(f"COSERVE_SEED={seed}")
    return random.Random(seed)


def test_any_request_gets_an_answer_and_changes_nothing_of_others(play: Play) -> None:
    draw = draws()
    play(lambda world: attack(world, draw, CASES, False), ignore_hosted_tools=draw.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_each_place_of_each_body_is_checked(play: Play, ignores: bool) -> None:
    draw = draws()
    play(lambda world: attack(world, draw, 150 * CASES, True), ignore_hosted_tools=ignores)


def test_streams_of_messages_that_are_cut_off_leave_nothing(play: Play) -> None:
    draw = random.Random(7)

    async def story(world: World) -> None:
        world.say("Hello", ends=False)
        async with listening(world.app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as http:

            async def cut(number: int) -> None:
                sent = {**OURS, "max_tokens": 1000, "stream": True}
                async with http.stream("POST", "/v1/messages", json=sent) as answer:
                    events = 0
                    async for line in answer.aiter_lines():
                        events += line.startswith("event:")
                        if events > number:
                            break

            await asyncio.gather(*(cut(draw.randrange(20)) for _ in range(8)))
            await world.until(lambda: not world.engine.running and not world.state.queue.inside)

    play(story)
