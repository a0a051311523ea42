"""Files that come in parts, as the official client sends them."""

import asyncio
import hashlib
import json
from typing import Any

import openai
import pytest

from serving import Play, World

DATA = b"".join(json.dumps({"prompt": f"{i}?", "completion": f" {i}"}).encode() + b"\n" for i in range(40))


async def begin(world: World, data: bytes = DATA, key: str = "unused", **fields: Any) -> Any:
    told = {
        "bytes": len(data),
        "filename": "a.jsonl",
        "mime_type": "text/jsonl",
        "purpose": "fine-tune",
        **fields,
    }
    return await world.client(key).uploads.create(**told)


def test_parts_become_a_file(play: Play) -> None:
    async def story(world: World) -> None:
        uploads = world.client().uploads
        upload = await begin(world)
        assert upload.status == "pending" and upload.expires_at > upload.created_at
        pieces = [DATA[at : at + 300] for at in range(0, len(DATA), 300)]
        order = [*range(1, len(pieces)), 0]
        ids = {i: (await uploads.parts.create(upload.id, data=pieces[i])).id for i in order}
        digest = hashlib.md5(DATA).hexdigest()
        done = await uploads.complete(upload.id, part_ids=[ids[i] for i in range(len(pieces))], md5=digest)
        assert done.status == "completed" and done.file is not None and done.file.purpose == "fine-tune"
        assert (await world.client().files.content(done.file.id)).content == DATA
        (row,) = (await world.state.store.files.page("local", None, 10, False)).records  # type: ignore[union-attr]
        assert row.examples == 40 and not [*(world.state.store.folder / "uploads").iterdir()]
        for asked in (uploads.cancel(upload.id), uploads.parts.create(upload.id, data=b"x")):
            with pytest.raises(openai.ConflictError):
                await asked

    play(story)


def test_what_does_not_fit_is_refused_and_the_upload_goes_on(play: Play) -> None:
    async def story(world: World) -> None:
        uploads = world.client().uploads
        upload = await begin(world, b"x" * 10, purpose="batch")
        whole = (await uploads.parts.create(upload.id, data=b"x" * 10)).id
        with pytest.raises(openai.APIStatusError) as refused:
            await uploads.parts.create(upload.id, data=b"x")
        assert refused.value.status_code == 413
        for ids, md5 in (
            ([whole, whole], None),
            (["part_" + "a" * 24], None),
            ([whole], "0" * 32),
            (["x"], None),
        ):
            with pytest.raises(openai.BadRequestError):
                await uploads.complete(upload.id, part_ids=ids, **({} if md5 is None else {"md5": md5}))
        assert (await uploads.complete(upload.id, part_ids=[whole])).status == "completed"
        bad = await begin(world, b"no data\n")
        part = (await uploads.parts.create(bad.id, data=b"no data\n")).id
        with pytest.raises(openai.BadRequestError):
            await uploads.complete(bad.id, part_ids=[part])
        assert (await uploads.cancel(bad.id)).status == "cancelled"
        assert len([*(world.state.store.folder / "files").iterdir()]) == 1

    play(story)


def test_pending_bytes_count_and_expire(play: Play) -> None:
    async def story(world: World) -> None:
        store = world.state.store
        first = await begin(world, b"x" * 60_000)
        with pytest.raises(openai.RateLimitError):
            await begin(world, b"x" * 60_000)
        store.uploads._clock = lambda: first.expires_at + 1.0
        await store.expire_files()
        await begin(world, b"x" * 60_000)
        with pytest.raises(openai.ConflictError):
            await world.client().uploads.parts.create(first.id, data=b"x")

    play(story, max_bytes_tenant=100_000)


def test_parts_that_come_at_once_keep_to_the_size_and_to_their_owner(play: Play) -> None:
    async def story(world: World) -> None:
        create = world.state.store.tenants.create_key
        ann, bob = (await create("ann"))[1], (await create("bob"))[1]
        upload = await begin(world, b"x" * 1000, key=ann)
        parts = world.client(ann).uploads.parts
        came = await asyncio.gather(
            *(parts.create(upload.id, data=b"x" * 400) for _ in range(5)), return_exceptions=True
        )
        assert sum(not isinstance(one, BaseException) for one in came) == 2
        for asked in (
            world.client(bob).uploads.parts.create(upload.id, data=b"x"),
            world.client(bob).uploads.cancel(upload.id),
            world.client(bob).uploads.complete(upload.id, part_ids=["part_" + "a" * 24]),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked

    play(story)
