"""Usage of a tenant, as the API tells it, is what its answers told; the audit log tells who did what."""

import random
from collections import Counter
from typing import Any

from coserve.serve.store import keys
from coserve.serve.store.usage import HOUR
from coserve.wire.messages import JobStarted, JobStep, Numbered
from serving import Play, World
from tinkering import Caller, passed
from training import create, upload

_DAY = 24 * HOUR


def test_usage_is_the_sum_of_what_answers_told(play: Play) -> None:
    async def story(world: World) -> None:
        draw, wanted = random.Random(9), Counter[str]()
        store, http = world.state.store, world.http
        secrets = [(await store.tenants.create_key(name))[1] for name in ("ann", "ann", "bob")]
        for _ in range(12):
            key = draw.choice(secrets)
            path = draw.choice(("chat/completions", "completions", "embeddings", "responses", "messages"))
            said = "a " * draw.randrange(1, 40)
            body: dict[str, Any] = {"model": "tiny"}
            body |= {"input": said} if path in ("embeddings", "responses") else {}
            body |= {"prompt": said, "n": draw.randrange(1, 3)} if path == "completions" else {}
            messages = [{"role": "user", "content": said}]
            body |= {"messages": messages} if path in ("chat/completions", "messages") else {}
            most = "max_output_tokens" if path == "responses" else "max_tokens"
            body |= {} if path == "embeddings" else {most: draw.randrange(16, 20)}
            headers = {"authorization": f"Bearer {key}"}
            reply = await http.post(f"/v1/{path}", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            told, id = reply.json()["usage"], keys.prefix_of(key)
            wanted[f"{id} input"] += told.get("prompt_tokens", told.get("input_tokens"))
            wanted[f"{id} output"] += told.get("completion_tokens", told.get("output_tokens", 0))
            wanted[f"{id} requests"] += 1
        found = Counter[str]()
        for secret in secrets[1:]:  # ann and bob
            headers = {"authorization": f"Bearer {secret}"}
            asked = {"start_time": 0, "bucket_width": "1h", "group_by": ["api_key_id", "model"]}
            page = (await http.get("/v1/usage", params=asked, headers=headers)).json()
            assert page["object"] == "page" and not page["has_more"]
            for bucket in page["data"]:
                assert bucket["end_time"] - bucket["start_time"] == HOUR
                for row in bucket["results"]:
                    if not row["num_model_requests"]:  # of kept bytes
                        continue
                    assert row["model"] == "tiny" and row["version"] is None
                    found[f"{row['api_key_id']} input"] += row["input_tokens"]
                    found[f"{row['api_key_id']} output"] += row["output_tokens"]
                    found[f"{row['api_key_id']} requests"] += row["num_model_requests"]
        assert +found == +wanted
        assert (await http.get("/v1/usage", params={"start_time": 0})).status_code == 401
        for bad in ({}, {"start_time": -1}, {"start_time": 0, "limit": 999}, {"start_time": 0, "page": "1x"}):
            assert (await http.get("/v1/usage", params=bad, headers=headers)).status_code == 400

    play(story)


def test_pages_of_days_go_on_where_the_last_one_ended(play: Play) -> None:
    async def story(world: World) -> None:
        store = world.state.store
        now = [10 * _DAY]
        store.usage._clock = lambda: now[0]
        for _ in range(5):
            now[0] += _DAY
            await world.client().completions.create(model="tiny", prompt="x", max_tokens=2)
        starts, page = [], None
        while True:
            asked = {"start_time": 12 * _DAY, "limit": 2} | ({} if page is None else {"page": page})
            found = (await world.http.get("/v1/usage", params=asked)).json()
            starts += [bucket["start_time"] for bucket in found["data"]]
            if (page := found["next_page"]) is None:
                break
        assert starts == [day * _DAY for day in (12, 13, 14, 15)]

    play(story)


def test_trained_tokens_count_once_and_what_was_done_is_in_the_audit_log(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        job = await create(world, training_file=file)
        await world.until(lambda: world.engine.said)
        world.engine.tell(Numbered(1, JobStarted(job.id, 0, 3, 30, 900, 0, 0, 1, 10, 1e-3)))
        for number, step in enumerate((1, 2, 2), 2):  # the last one as after a resume
            world.engine.tell(Numbered(number, JobStep(job.id, step, 1.0, 9, 100 + step, 1.0, 1e-3, 0.1)))
        client = Caller(world)
        run = await client.run()
        assert (await client.post("forward_backward", passed(run, 1))).status_code == 200
        store = world.state.store

        async def trained() -> int:
            await store.usage.merge()
            return sum(row[2]["trained_tokens"] for row in await store.usage.rows(0, 2**40))

        while await trained() < 101 + 102 + 3:
            pass
        assert await trained() == 101 + 102 + 3
        await world.client().fine_tuning.jobs.cancel(job.id)
        await world.client().files.delete(file)
        rows = [(row.action, row.subject) for row in await store.audit.list()]
        assert rows == [
            ("file.created", file),
            ("job.created", job.id),
            ("job.cancelled", job.id),
            ("file.deleted", file),
        ]
        (told,) = {row.actor for row in await store.audit.list()}
        assert told == "local" and all(row.request_id for row in await store.audit.list())

    play(story)
