"""`Idempotency-Key`: a request that comes again creates nothing, and gets the first one's reply."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coserve.errors import StateError
from coserve.serve.http import idempotency
from coserve.serve.store.creations import CreationStore
from serving import SECONDS, Play, World, world
from training import CHAT, jsonl, upload

ADAPTER = {"config": b'{"peft_type": "LORA", "r": 4}', "weights": b"\x08\0\0\0\0\0\0\0{}      "}
SAMPLES = 4


async def send(world: World, kind: str, variant: str, key: str | None, who: str = "k") -> httpx2.Response:
    """A request that creates something of a kind, of which each variant asks for something else."""
    headers = {"authorization": f"Bearer {who}", **({} if key is None else {"Idempotency-Key": key})}
    post = world.http.post
    if kind == "file":
        question, *answer = CHAT["messages"]
        data = jsonl(*[{"messages": [{**question, "content": variant}, *answer]}] * 3)
        return await post(
            "/v1/files", headers=headers, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", data)}
        )
    if kind == "job":
        file = (await world.client(who).files.list(order="asc", limit=1)).data[0]
        body = {"model": "tiny", "training_file": file.id, "suffix": variant}
        return await post("/v1/fine_tuning/jobs", headers=headers, json=body)
    if kind == "adapter":
        files = {name: (name, content) for name, content in ADAPTER.items()}
        return await post("/v1/adapters", headers=headers, data={"name": f"{kind}-{variant}"}, files=files)
    return await post("/api/v1/create_session", headers=headers, json={"tags": [], "display_name": variant})


def test_the_second_reply_is_the_first_one_s(play: Play) -> None:
    """Of all that can be created; a refused request leaves its key free."""

    async def story(world: World) -> None:
        await upload(world)
        for kind in ("file", "job", "adapter", "session"):
            first = await send(world, kind, "x", f"k-{kind}")
            again = await send(world, kind, "x", f"k-{kind}")
            assert first.status_code == 200, first.text
            assert (again.status_code, again.content) == (200, first.content)
            assert again.headers["content-type"] == first.headers["content-type"]
            assert "idempotent-replayed" not in first.headers
            assert again.headers["idempotent-replayed"] == "true"
            other = await send(world, kind, "y", f"k-{kind}")
            assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"
        elsewhere = await send(world, "session", "x", "k-file")
        assert elsewhere.status_code == 422
        for key in ("", "x" * 256, "a\x07b", "é"):
            wrong = await world.http.post("/v1/files", headers={"Idempotency-Key": key.encode()}, content=b"")
            assert wrong.status_code == 400 and "1 to 255 printable" in wrong.json()["error"]["message"]
        body: dict[str, Any] = {"model": "tiny", "training_file": "file-none"}
        refused = await world.http.post("/v1/fine_tuning/jobs", headers={"Idempotency-Key": "r"}, json=body)
        assert refused.status_code == 404
        assert (await send(world, "job", "z", "r")).status_code == 200
        chats = [
            await world.http.post(
                "/v1/completions",
                headers={"Idempotency-Key": "k-file"},
                json={"model": "tiny", "prompt": "x", "max_tokens": 1},
            )
            for _ in range(2)
        ]
        assert [one.status_code for one in chats] == [200, 200] and len(world.submits()) == 2

    play(story)


def test_keys_are_their_tenant_s(play: Play) -> None:
    async def story(world: World) -> None:
        _, ann = await world.state.store.tenants.create_key("ann")
        _, bob = await world.state.store.tenants.create_key("bob")
        ids = [(await send(world, "file", "x", "same", who)).json()["id"] for who in (ann, bob, ann, bob)]
        assert ids[0] != ids[1] and ids[:2] == ids[2:]

    play(story)


def test_a_request_under_way_keeps_its_key(play: Play) -> None:
    async def story(world: World) -> None:
        reading, go = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
            reading.set()
            await go.wait()
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            yield jsonl(CHAT) + b"\r\n--x--\r\n"

        headers = {"Idempotency-Key": "k", "content-type": "multipart/form-data; boundary=x"}
        first = asyncio.create_task(world.http.post("/v1/files", headers=headers, content=slow()))
        await reading.wait()
        second = await send(world, "file", "x", "k")
        assert second.status_code == 409 and second.json()["error"]["code"] == "idempotency_key_in_use"
        assert second.headers["x-should-retry"] == "true" and second.headers["retry-after"] == "1"
        go.set()
        assert (await first).status_code == 200
        again = await world.http.post("/v1/files", headers=headers, content=slow())
        assert again.content == (await first).content

    play(story)


def test_large_replies_are_read_again_and_old_keys_are_free(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MOST_REPLY", 10)
    now = [1_000_000.0]
    monkeypatch.setattr(CreationStore, "_oldest", property(lambda self: now[0] - self._seconds))

    async def story(world: World) -> None:
        creations = world.state.store.creations
        monkeypatch.setattr(creations, "_clock", lambda: now[0])
        first = await send(world, "file", "x", "k")
        assert (await send(world, "file", "x", "k")).json() == first.json()
        await world.client().files.delete(first.json()["id"])
        gone = await send(world, "file", "x", "k")
        assert gone.status_code == 404, "what the reply would have told is gone"
        now[0] += 61
        assert (await send(world, "file", "y", "k")).json()["id"] != first.json()["id"]
        now[0] += 61
        assert not await creations.sweep() and await creations.find("any") is None
        ids = [(await send(world, "file", "z", f"key-{n}")).json()["id"] for n in range(4)]
        again = [(await send(world, "file", "z", f"key-{n}")).json()["id"] for n in (3, 2, 1, 0)]
        assert again[:3] == ids[:0:-1] and again[3] not in ids, "the fourth was beyond the three newest"

    play(story, max_idempotency_keys=3, idempotency_seconds=60)


@dataclass
class History:
    """The knowledge of two clients: for each key the request that was first answered, and the reply."""

    known: dict[str, tuple[tuple[str, str], bytes]] = field(default_factory=dict)

    def take(self, key: str, request: tuple[str, str], answer: httpx2.Response, alone: bool) -> None:
        """Checks an answer."""
        if answer.status_code == 409:
            assert not alone and answer.json()["error"]["code"] == "idempotency_key_in_use"
        elif key not in self.known:
            assert answer.status_code == 200, answer.text
            self.known[key] = request, answer.content
        elif self.known[key][0] == request:
            assert (answer.status_code, answer.json()) == (200, json.loads(self.known[key][1]))
        else:
            assert answer.status_code == 422, answer.text


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(SAMPLES))
def test_whatever_the_history_a_key_creates_one_thing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients at once, restarts, and servers that end between a creation and keeping its reply."""
    draw, history = random.Random(f"idempotency/{seed}"), History()
    finish, is_lost = CreationStore.finish, [False]

    async def finished(self: CreationStore, *given: Any) -> None:
        if is_lost[0]:
            raise StateError("the server has ended")
        await finish(self, *given)

    monkeypatch.setattr(CreationStore, "finish", finished)

    async def part(it: World) -> None:
        for _ in range(12):
            # Replies without a path at which they can be read again are lost with their server.
            kinds = ("file", "job") if (lost := draw.random() < 0.3) else ("file", "job", "session")
            is_lost[0] = lost
            asked = [
                (
                    draw.choice("abcdef") if draw.random() < 0.8 else f"key-{draw.randrange(40)}",
                    draw.choice(kinds),
                )
                for _ in range(2)
            ]
            requests = [(key, (kind, draw.choice("xy"))) for key, kind in asked]
            answers = await asyncio.gather(*(send(it, *request, key) for key, request in requests))
            alone = requests[0][0] != requests[1][0]
            for (key, request), answer in sorted(
                zip(requests, answers, strict=True), key=lambda one: one[1].status_code
            ):
                history.take(key, request, answer, alone)

    async def whole() -> None:
        for number in range(3):
            async with asyncio.timeout(SECONDS), world(tmp_path, {}, {}) as it:
                if not number:
                    await upload(it)
                await part(it)
                created = {
                    kind: sum(one[0][0] == kind for one in history.known.values())
                    for kind in ("file", "job", "session")
                }
                assert len([one async for one in it.client().files.list()]) == created["file"] + 1
                assert len([one async for one in it.client().fine_tuning.jobs.list()]) == created["job"]
                assert len((await it.http.get("/api/v1/sessions")).json()["sessions"]) == created["session"]

    asyncio.run(whole())
    assert len(history.known) > 6
