"""Batches, as the official client sees them, through deaths of engines and servers."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve.serve.batches import runner
from coserve.serve.batches.lines import BatchReader
from coserve.serve.schema.batches import BatchRequest
from serving import SECONDS, Play, World, world
from waiting import until

Line = dict[str, Any]
OVER = ("completed", "failed", "expired", "cancelled")


def line(number: int, **fields: Any) -> Line:
    body = {"model": "tiny", "prompt": f"number {number}", "max_tokens": 2, "seed": number, **fields}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


async def start(world: World, data: bytes, key: str = "unused", **more: Any) -> Any:
    client = world.client(key)
    file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
    fields = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, **fields)


def jsonl(*lines: Line) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def ended(world: World, id: str, key: str = "unused") -> Any:
    async with asyncio.timeout(SECONDS):
        while (batch := await world.client(key).batches.retrieve(id)).status not in OVER:
            await asyncio.sleep(0.02)
    return batch


async def results(world: World, file: str | None, key: str = "unused") -> list[Line]:
    if file is None:
        return []
    text = (await world.client(key).files.content(file)).text
    return [json.loads(one) for one in text.splitlines()]


def test_each_line_has_one_result(play: Play) -> None:
    async def story(world: World) -> None:
        bad: list[Any] = [
            b"not json", b"[]", jsonl({**line(1), "custom_id": ""})[:-1],
            jsonl({**line(2), "method": "GET"})[:-1],
            jsonl({**line(3), "url": "/v1/chat/completions"})[:-1], jsonl(line(4))[:-1],  # an id twice
            jsonl(line(5, model="nobody"))[:-1], jsonl(line(6, stream=True))[:-1], jsonl(line(7, n="x"))[:-1],
            jsonl({**line(8), "body": 7})[:-1], b'{"custom_id":"\xff"}',
        ]  # fmt: skip
        data = jsonl(*(line(number) for number in (4, 10, 11))) + b"\n\n" + b"\n".join(bad)
        made = await start(world, data, metadata={"of": "test"})
        assert made.object == "batch" and made.status == "validating" and made.metadata == {"of": "test"}
        batch = await ended(world, made.id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 14, 3, 11)
        answers = {one["custom_id"]: one for one in await results(world, batch.output_file_id)}
        assert (
            set(answers) == {"id-4", "id-10", "id-11"} and len({one["id"] for one in answers.values()}) == 3
        )
        direct = await world.client().completions.create(**line(4)["body"])
        for one in answers.values():
            assert one["error"] is None and one["response"]["status_code"] == 200
        assert answers["id-4"]["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
        failed = await results(world, batch.error_file_id)
        codes = sorted((one["error"] or one["response"]["body"]["error"])["code"] or "" for one in failed)
        assert codes == sorted([
            "invalid_json_line", "invalid_json_line", "invalid_json_line", "invalid_value", "invalid_method",
            "mismatched_url", "duplicate_custom_id", "model_not_found", *["invalid_value"] * 3,
        ])  # fmt: skip
        assert [one.background for one in world.submits()] == [True] * 3 + [False]
        assert not [*(world.state.store.folder / "batches").iterdir()]
        files = await world.client().files.list(purpose="batch_output")
        assert {file.id for file in files.data} == {batch.output_file_id, batch.error_file_id}

    play(story)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
def test_batches_of_the_other_endpoints(play: Play, endpoint: str) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "input": "x"}
        if endpoint.startswith("/v1/chat"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        if endpoint == "/v1/responses":
            body = {"model": "tiny", "input": "x", "max_output_tokens": 2}
        lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i in range(3)]
        lines += [{**lines[0], "custom_id": "alone", "body": {**body, "background": True}}]
        batch = await ended(world, (await start(world, jsonl(*lines), endpoint=endpoint)).id)
        found = await results(world, batch.output_file_id)
        kind = {"/v1/embeddings": "list", "/v1/responses": "response"}.get(endpoint, "chat.completion")
        (alone,) = await results(world, batch.error_file_id)
        assert alone["response"]["body"]["error"]["param"] == "background"
        assert [one["response"]["body"]["object"] for one in found] == [kind] * 3
        assert all(one.background for one in world.submits())

    play(story)


async def survive(folder: Path, count: int) -> None:
    """A batch beside live traffic, through an engine's and a server's death."""
    lines = [line(number) for number in range(count)]
    lines[3:5] = [{**line(3), "url": "x"}, line(4, model="nobody")]

    async def traffic(it: World) -> None:
        while True:
            answer = await it.http.post(
                "/v1/completions", json={"model": "tiny", "prompt": "live", "max_tokens": 2}
            )
            assert answer.status_code == 200

    def told(it: World) -> int:
        (batch,) = it.app.state.batches._under_way.values()
        return len(batch.output.done) + len(batch.errors.done)

    async with world(folder, {}, {}) as first:
        live = asyncio.create_task(traffic(first))
        made = await start(first, jsonl(*lines))
        await until(lambda: first.app.state.batches._under_way and told(first) > count // 4)
        await first.engine.die()
        await asyncio.sleep(0.01)
        await first.engine.start()
        await until(lambda: told(first) > count // 2)
        live.cancel()
        before = told(first)
    output = folder / "state" / "batches" / made.id / "output.jsonl"
    assert output.read_bytes().count(b"\n") >= before - 2  # two are among the errors
    with output.open("ab") as file:  # as a server leaves it that is killed while it writes
        file.write(b'{"id":"batch_req_x-7","custom_id":"id-')
    async with world(folder, {}, {}) as second:
        live = asyncio.create_task(traffic(second))
        batch = await ended(second, made.id)
        live.cancel()
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == (
            "completed",
            count,
            count - 2,
            2,
        )
        answers = await results(second, batch.output_file_id)
        assert sorted(one["custom_id"] for one in answers) == sorted(
            f"id-{number}" for number in range(count) if number not in (3, 4)
        )
        assert {one["custom_id"] for one in await results(second, batch.error_file_id)} == {"id-3", "id-4"}
        assert len([one for one in second.submits() if one.background]) < count - before + 40  # none anew
        again = await second.client().completions.create(**line(count - 1)["body"])
        its = next(one for one in answers if one["custom_id"] == f"id-{count - 1}")
        assert its["response"]["body"]["choices"][0]["text"] == again.choices[0].text


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_line_is_lost_or_doubled(tmp_path: Path, count: int) -> None:
    asyncio.run(survive(tmp_path, count))


def test_a_server_that_ends_before_it_tells_of_the_files(tmp_path: Path) -> None:
    async def whole() -> None:
        async with world(tmp_path, {}, {}) as first:
            first.app.state.batches.state.store.batches.advance = stuck(first)  # type: ignore[method-assign]
            made = await start(first, jsonl(line(1), line(2)))
            file = first.state.store.folder / "files" / f"file-{made.id.removeprefix('batch_')}o.jsonl"
            await until(file.exists)
        async with world(tmp_path, {}, {}) as second:
            batch = await ended(second, made.id)
            assert batch.status == "completed" and batch.request_counts.completed == 2
            assert len(await results(second, batch.output_file_id)) == 2 and not second.submits()

    def stuck(it: World) -> Any:
        advance = it.state.store.batches.advance

        async def until_the_end(id: str, source: Any, files: Any = (), **values: Any) -> Any:
            if files:
                await asyncio.sleep(SECONDS)
            return await advance(id, source, files, **values)

        return until_the_end

    asyncio.run(whole())


def test_a_batch_that_is_cancelled_keeps_its_answers(play: Play) -> None:
    async def story(world: World) -> None:
        client = world.client()
        made = await start(world, jsonl(line(0), *(line(i, max_tokens=2000) for i in range(1, 40))))
        waits = await start(world, jsonl(line(0)))  # for the tenant's turn
        assert (await client.batches.cancel(waits.id)).status == "cancelling"
        assert (await ended(world, waits.id)).request_counts.failed == 1
        under_way = world.app.state.batches._under_way
        await world.until(lambda: under_way and under_way[made.id].output.done)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        batch = await ended(world, made.id)
        assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
        assert [one["custom_id"] for one in await results(world, batch.output_file_id)] == ["id-0"]
        rest = await results(world, batch.error_file_id)
        assert [one["error"]["code"] for one in rest] == ["batch_cancelled"] * 39
        await world.until(lambda: not world.engine.running)
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(made.id)

    play(story, engine={"step_seconds": 0.005})


@pytest.mark.parametrize(
    ("status", "setting", "code"),
    [("expired", {}, "batch_expired"), ("failed", {"max_bytes_tenant": 60_000}, "batch_failed")],
)
def test_a_batch_ends_with_its_time_or_room(
    play: Play, monkeypatch: pytest.MonkeyPatch, status: str, setting: dict[str, int], code: str
) -> None:
    monkeypatch.setattr(runner, "_NOTE_SECONDS", 0.05)

    async def story(world: World) -> None:
        made = await start(
            world, jsonl(line(0), *(line(i, max_tokens=300, logprobs=5, echo=True) for i in range(1, 12)))
        )
        under_way = world.app.state.batches._under_way
        await world.until(lambda: under_way and under_way[made.id].output.done)
        if status == "expired":
            store, now = world.app.state.batches.state.store, time.time()
            monkeypatch.setattr(store, "clock", lambda: now + 86_400.0)
        batch = await ended(world, made.id)
        assert batch.status == status and (batch.errors is not None) == (status == "failed")
        rest = await results(world, batch.error_file_id)
        assert rest and {one["error"]["code"] for one in rest} == {code}
        assert batch.request_counts.completed + batch.request_counts.failed == 12

    play(story, engine={"step_seconds": 0.002}, **setting)


def test_what_cannot_be_a_batch(play: Play) -> None:
    async def story(world: World) -> None:
        store, client = world.state.store, world.client()
        for data, code in ((b"\n \n", "empty_file"), (b"{}\n" * 50_001, "too_many_requests")):
            batch = await ended(world, (await start(world, data)).id)
            assert batch.status == "failed" and batch.errors.data[0].code == code
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(
                input_file_id="file-x", endpoint="/v1/completions", completion_window="24h"
            )
        tuned = await client.files.create(
            file=("a.jsonl", jsonl({"prompt": "a", "completion": "b"})), purpose="fine-tune"
        )
        for fields in (
            {"input_file_id": tuned.id},
            {"endpoint": "/v1/images"},
            {"completion_window": "0h"},
            {"completion_window": "169h"},
        ):
            body = {
                "input_file_id": "file-x",
                "endpoint": "/v1/completions",
                "completion_window": "24h",
                **fields,
            }
            assert (await world.http.post("/v1/batches", json=body)).status_code == 400
        assert await store.batches.unended() == ()

    play(story)


def test_any_whole_number_of_hours_up_to_a_week_is_a_window() -> None:
    same = {"input_file_id": "file-x", "endpoint": "/v1/completions"}
    for hours in range(1, 169):
        BatchRequest.model_validate({**same, "completion_window": f"{hours}h"})


def test_another_tenant_sees_none_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.state.store.tenants.create_key
        ann, bob = (await create("ann"))[1], (await create("bob"))[1]
        made = await start(world, jsonl(line(1)), key=ann)
        batch = await ended(world, made.id, key=ann)
        other = world.client(bob)
        assert not (await other.batches.list()).data and (await world.client(ann).batches.list()).data
        for asked in (
            other.batches.retrieve(made.id),
            other.batches.cancel(made.id),
            other.files.content(batch.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(
                input_file_id=made.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )

    play(story)


def test_lines_of_any_length_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coserve.serve.batches.lines._LONGEST_LINE", 300)
    monkeypatch.setattr("coserve.serve.batches.lines._PIECE", 100)
    texts = [
        jsonl(line(0)),
        b"x" * 1000 + b"\n",
        b"y" * 302 + b"\n",
        b"\r\n",
        jsonl(line(1, user="u" * 90))[:-1],
    ]
    (tmp_path / "input").write_bytes(b"".join(texts))
    reader, found = BatchReader(tmp_path / "input", "/v1/completions", {2}), []
    while some := reader.take():
        found += some
    reader.close()
    assert [(one.number, one.custom_id) for one in found] == [(1, "id-0"), (3, None), (5, "id-1")]
    assert found[1].fault is not None and found[1].fault.code == "request_too_large"
