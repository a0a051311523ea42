"""`/v1/files` through the official client."""

import asyncio
import time
from typing import Any

import openai
import pytest

from serving import Play, World
from training import CHAT, Trainer, create, jsonl, upload


async def put(world: World, name: str, data: bytes, **more: Any) -> Any:
    return await world.client().files.create(file=(name, data), **{"purpose": "fine-tune", **more})


def test_a_file_comes_and_goes(play: Play) -> None:
    async def story(world: World) -> None:
        files, data = world.client().files, jsonl(CHAT, CHAT, CHAT)
        file = await put(world, "chats.jsonl", data)
        assert file.id.startswith("file-") and len(file.id) == 29
        assert (file.object, file.bytes, file.filename) == ("file", len(data), "chats.jsonl")
        assert (file.purpose, file.status) == ("fine-tune", "processed")
        assert await files.retrieve(file.id) == file
        assert (await files.content(file.id)).content == data
        assert [path.suffix for path in world.state.settings.files.iterdir()] == [".jsonl"]
        deleted = await files.delete(file.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
        assert not list(world.state.settings.files.iterdir())
        for ask in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)

    play(story)


def test_a_large_file_and_a_corpus(play: Play) -> None:
    async def story(world: World) -> None:
        data = jsonl(*[{"text": "x" * 1000}] * 3000)
        file = await put(world, "large.jsonl", data)
        assert (await world.client().files.content(file.id)).content == data
        corpus = await put(world, "Book.TXT", b"one\nparagraph\n\nanother\n\n\nthird")
        kept = await world.state.store.files.get("local", corpus.id)
        assert kept is not None and (kept.examples, kept.suffix) == (3, ".txt")

    play(story)


def test_keys_that_are_not_read_are_named_at_the_upload(play: Play) -> None:
    async def story(world: World) -> None:
        file = await put(world, "a.jsonl", jsonl({**CHAT, "id": 1}, {**CHAT, "source": "x"}))
        assert file.status_details == "Not read of its records: id, source"
        files = world.client().files
        assert (await files.retrieve(file.id)) == file and (await files.list()).data == [file]
        assert (await put(world, "b.jsonl", jsonl(CHAT))).status_details is None
        wrapped = await put(world, "c.json", b'{"data": [{"prompt": "a", "response": "b"}]}')
        kept = await world.state.store.files.get("local", wrapped.id)
        assert kept is not None and kept.examples == 1

    play(story)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("bad.jsonl", jsonl(CHAT) + b"\n" + b'{"messages": [', "bad.jsonl, line 3: expected one JSON object"),
        ("bad.jsonl", jsonl(CHAT, CHAT, {"message": []}), "bad.jsonl, line 3: expected"),
        ("bad.jsonl", jsonl(CHAT) + b"\xff\n", "bad.jsonl, line 2: expected UTF-8"),
        ("empty.jsonl", b"", "empty.jsonl: expected at least one example"),
        ("empty.txt", b"\n\n", "empty.txt: expected at least one example"),
        (
            "mixed.jsonl",
            jsonl(CHAT, {"text": "a"}),
            "line 2: expected chats in messages, as in line 1; found texts",
        ),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": 3}]',
            'a.json, record 2, line 2: expected "text" to be a string',
        ),
        (
            "bad.jsonl.gz",
            jsonl(CHAT),
            "bad.jsonl.gz: expected a whole gzip file, as its name ends with .gz",
        ),
        ("bad.csv", b"text\na\nb,c\n", "bad.csv, line 3: expected 1 fields, as in the header; found 2"),
    ],
)
def test_bad_lines_are_named(shared_play: Play, name: str, data: bytes, said: str) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await put(world, name, data)
        assert caught.value.param == "file" and caught.value.code == "invalid_file"
        assert said in str(caught.value.message)
        assert not list(world.state.settings.files.iterdir())
        assert not (await world.client().files.list()).data

    shared_play(story)


def test_what_is_no_upload_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        for purpose in ("assistants", "batch_output", "fine-tune-results", "x"):
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await put(world, "a.jsonl", jsonl(CHAT), purpose=purpose)
        with pytest.raises(openai.BadRequestError, match="expires_behind"):
            await put(world, "a.jsonl", jsonl(CHAT), extra_body={"expires_behind": "x"})
        form = {"content-type": "multipart/form-data; boundary=x"}
        for body, headers, said in (
            (b"{}", {"content-type": "application/json"}, "must be multipart/form-data"),
            (b"{}", {"content-type": "multipart/form-data"}, "must be multipart/form-data"),
            (b"nonsense", form, "cannot be read"),
            (
                b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--',
                form,
                "'file'",
            ),
            (b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nab', form, "before its end"),
            (b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nab\r\n--x--', form, "'purpose'"),
            (b'--x\r\nContent-Disposition: form-data; name="p"\r\n\r\n' + b"y" * 70_000, form, "65536"),
            (b"--x\r\n\r\n\r\n" * 20 + b"--x--", form, "parts"),
        ):
            answer = await world.http.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == 400, body[:80]
            assert said in answer.json()["error"]["message"], answer.json()
        assert not list(world.state.settings.files.iterdir())

    play(story)


def test_a_file_over_the_limit_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await put(world, "a.jsonl", jsonl({"text": "x" * 5000}))
        assert caught.value.status_code == 413 and caught.value.code == "file_too_large"
        assert not list(world.state.settings.files.iterdir())
        await put(world, "b.jsonl", jsonl({"text": "x" * 500}))

    play(story, max_file_bytes=4096)


def test_a_client_that_goes_away_leaves_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        async def part() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 100
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await world.http.post(
                "/v1/files", content=part(), headers={"content-type": "multipart/form-data; boundary=x"}
            )
        await asyncio.sleep(0)
        assert not list(world.state.settings.files.iterdir())

    play(story)


def test_lists_are_in_order_and_in_pages(play: Play) -> None:
    async def story(world: World) -> None:
        files = world.client().files
        ids = [(await put(world, f"{i}.jsonl", jsonl(CHAT))).id for i in range(5)]
        first = await files.list(limit=2)
        assert [file.id for file in first.data] == ids[:-3:-1] and first.has_more
        assert [file.id async for file in await files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in await files.list(limit=2, order="asc")] == ids
        rest = await files.list(after=ids[1], order="asc")
        assert [file.id for file in rest.data] == ids[2:] and not rest.has_more
        await files.delete(ids[2])  # what comes behind a page does not shift
        assert [file.id async for file in await files.list(limit=1, order="asc")] == ids[:2] + ids[3:]
        assert not (await files.list(purpose="fine-tune-results")).data
        assert len((await files.list(purpose="fine-tune")).data) == 4
        for bad in ({"after": "file-none"}, {"limit": 0}, {"limit": 10**9}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                await files.list(**bad)

    play(story)


def test_another_tenants_file_is_one_that_does_not_exist(play: Play) -> None:
    async def story(world: World) -> None:
        _, ann = await world.state.store.tenants.create_key("ann")
        _, bob = await world.state.store.tenants.create_key("bob")
        file = await upload(world, ann)

        async def refusals(id: str) -> list[str]:
            files, said = world.client(bob).files, []
            jobs = world.client(bob).fine_tuning.jobs
            for ask in (
                files.retrieve(id),
                files.content(id),
                files.delete(id),
                files.list(after=id),
                jobs.create(model="tiny", training_file=id),
            ):
                with pytest.raises(openai.APIStatusError) as caught:
                    await ask
                said.append(f"{caught.value.status_code} {caught.value.response.text.replace(id, 'ID')}")
            return said

        assert await refusals(file) == await refusals("file-" + "x" * 24)
        assert not (await world.client(bob).files.list()).data
        assert [f.id for f in (await world.client(ann).files.list()).data] == [file]

    play(story)


def test_a_file_stays_while_a_job_reads_it(play: Play) -> None:
    async def story(world: World) -> None:
        train, valid = await upload(world), await upload(world)
        job = await create(world, training_file=train, validation_file=valid)
        for id in (train, valid):
            with pytest.raises(openai.ConflictError) as caught:
                await world.client().files.delete(id)
            assert caught.value.response.headers["x-should-retry"] == "false"
        await Trainer(world).succeed(job.id)
        for id in (train, valid):
            await world.client().files.delete(id)

    play(story)


def test_expired_files_vanish_once_no_job_reads_them(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        store, after = world.state.store, {"anchor": "created_at", "seconds": 3600}
        ids = []
        for name in ("idle", "read", "lasting"):
            more = {} if name == "lasting" else {"expires_after": after}
            file = await put(world, f"{name}.jsonl", jsonl(*[CHAT] * 30), **more)
            assert file.expires_at == (None if name == "lasting" else file.created_at + 3600)
            assert await world.client().files.retrieve(file.id) == file
            ids.append(file.id)
        idle, read, lasting = ids
        job = await create(world, training_file=lasting, validation_file=read)
        assert not await store.expire_files()
        assert len(list(world.state.settings.files.iterdir())) == 3
        later = time.time() + 3601
        monkeypatch.setattr(store.files, "_clock", lambda: later)
        monkeypatch.setattr(store.jobs, "_clock", lambda: later)

        async def listed() -> set[str]:
            return {one.id async for one in world.client().files.list()}

        for ask in (world.client().files.retrieve, world.client().files.content, world.client().files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(idle)
        with pytest.raises(openai.NotFoundError):
            await create(world, training_file=idle)
        assert await listed() == {read, lasting}
        assert not await store.expire_files()
        assert {path.stem for path in world.state.settings.files.iterdir()} == {read, lasting}
        with pytest.raises(openai.ConflictError):
            await world.client().files.delete(read)
        await world.client().fine_tuning.jobs.cancel(job.id)
        assert await listed() == {lasting}
        assert not await store.expire_files()
        assert {path.stem for path in world.state.settings.files.iterdir()} == {lasting}

    play(story)


@pytest.mark.parametrize(
    ("after", "param"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 2_592_001}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "9" * 5000}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 3600.5}, "expires_after.seconds"),
        ({"anchor": "created_at"}, "expires_after.seconds"),
        ({"anchor": "last_active_at", "seconds": 3600}, "expires_after.anchor"),
        ({"seconds": 3600}, "expires_after.anchor"),
        ({"anchor": "created_at", "seconds": 3600, "x": 1}, "expires_after[x]"),
    ],
)
def test_wrong_lives_of_files_are_refused(shared_play: Play, after: dict[str, Any], param: str) -> None:
    async def story(world: World) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await put(world, "a.jsonl", jsonl(CHAT), expires_after=after)
        assert caught.value.param == param and len(caught.value.message) < 1200
        assert not list(world.state.settings.files.iterdir())

    shared_play(story)
