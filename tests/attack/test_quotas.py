"""Tenants and strangers who want more than there is for them: each is refused alone, with the time."""

import asyncio
import math
import random
from typing import Any

import httpx2
import openai
import pytest

from coserve.serve.app import create_app
from coserve.serve.http import quotas
from coserve.serve.http.quotas import DISK_RESERVE
from coserve.serve.store import keys
from coserve.serve.store.database import Database
from serving import Play, World
from tinkering import Caller, passed
from training import create, upload

SEEDS = range(2)


class Clock:
    """Seconds as the test says."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


class Account:
    """Tokens that each name has, computed from the definition."""

    def __init__(self, most: int) -> None:
        self.most, self.held, self.at = most, dict[str, float](), dict[str, float]()

    def wait(self, name: str, now: float) -> float:
        grown = (now - self.at.get(name, now)) * self.most / 60
        self.held[name] = min(self.held.get(name, self.most) + grown, self.most)
        self.at[name] = now
        return max(1 - self.held[name], 0) * 60 / self.most

    def take(self, name: str) -> None:
        self.held[name] -= 1


def told(answer: httpx2.Response) -> tuple[str, str]:
    """(code, message) of an error, which must name the time that its header does."""
    error = answer.json()["error"]
    if answer.status_code == 429 and error["code"] == "rate_limit_exceeded":
        assert f"again in {answer.headers['retry-after']} second" in error["message"]
    return error["code"], error["message"]


@pytest.mark.parametrize("seed", SEEDS)
def test_guesses_at_keys_are_counted_by_address_and_right_keys_never_refused(
    play: Play, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, clock, reads = random.Random(seed), Clock(), [0]
    read = Database.read

    async def counted(self: Database, work: Any) -> Any:
        reads[0] += 1
        return await read(self, work)

    monkeypatch.setattr(Database, "read", counted)

    async def story(world: World) -> None:
        _, secret = await world.state.store.tenants.create_key("ann")
        app, account = create_app(world.state, clock), Account(5)
        for _ in range(80):
            clock.now += draw.choice((0, 0, 0, 0.5, 7, 30))
            network = draw.choice(("10.0.0.1", "10.0.0.2", "2001:db8:1:2"))
            host = f"{network}::{draw.randrange(1, 9999):x}" if ":" in network else network
            given = draw.choice((None, "", "x", f"{secret}x", secret[:-1], keys.draw(), secret))
            headers = {} if given is None else {"authorization": f"Bearer {given}"}
            transport = httpx2.ASGITransport(app=app, client=(host, 1))
            wait, reads[0] = account.wait(network, clock.now), 0
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                answer = await http.get("/v1/models", headers=headers)
            if given == secret:
                assert answer.status_code == 200
            elif wait > 1e-6:
                assert answer.status_code == 429 and told(answer)[0] == "rate_limit_exceeded"
                assert int(answer.headers["retry-after"]) == max(math.ceil(wait - 1e-6), 1)
                assert keys.is_shaped(given) or not reads[0]
            else:
                assert answer.status_code == 401
                account.take(network)

    play(story, max_bad_keys_minute=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_that_asks_too_often_is_told_when_and_others_notice_nothing(play: Play, seed: int) -> None:
    draw, clock = random.Random(seed), Clock()

    async def story(world: World) -> None:
        secrets = {name: (await world.state.store.tenants.create_key(name))[1] for name in ("ann", "bob")}
        other, account = (await world.state.store.tenants.create_key("ann"))[1], Account(8)
        transport = httpx2.ASGITransport(app=create_app(world.state, clock))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for _ in range(60):
                clock.now += draw.choice((0, 0, 0, 1, 9))
                name = draw.choice(("ann", "ann", "ann", "bob"))
                key = draw.choice((secrets["ann"], other)) if name == "ann" else secrets["bob"]
                method, path, expected = draw.choice((
                    ("GET", "/v1/models", 200), ("GET", "/v1/files", 200), ("POST", "/v1/completions", 400),
                    ("GET", "/v1/nothing", 404), ("DELETE", "/v1/files/x", 404), ("GET", "/metrics", 200),
                ))  # fmt: skip
                wait = 0.0 if path == "/metrics" else account.wait(name, clock.now)
                answer = await http.request(method, path, headers={"authorization": f"Bearer {key}"})
                if wait > 1e-6:
                    assert answer.status_code == 429 and told(answer)[0] == "rate_limit_exceeded"
                    assert int(answer.headers["retry-after"]) == max(math.ceil(wait - 1e-6), 1)
                else:
                    assert answer.status_code == expected
                    if path != "/metrics":
                        account.take(name)

    play(story, max_requests_minute=8)


async def send_file(world: World, data: bytes, key: str, chunked: bool = False) -> httpx2.Response:
    """An upload; `chunked` does not say how long it is."""
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    body = head + data + b"\r\n--x--\r\n"

    async def pieces() -> Any:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]
            await asyncio.sleep(0)

    headers = {"content-type": "multipart/form-data; boundary=x", "authorization": f"Bearer {key}"}
    content = pieces() if chunked else body
    return await world.http.post("/v1/files", content=content, headers=headers)


@pytest.mark.parametrize("seed", SEEDS)
def test_uploads_at_once_never_pass_the_quota_together(play: Play, seed: int) -> None:
    """Whatever comes together; what is refused leaves nothing behind, and what is deleted makes room."""
    draw, most, most_files = random.Random(seed), 40_000, 9

    async def story(world: World) -> None:
        store = world.state.store
        _, ann = await store.tenants.create_key("ann")
        _, bob = await store.tenants.create_key("bob")
        assert (await send_file(world, b"x" * 30_000, bob)).status_code == 200
        owner = await store.tenants.of_key(ann)
        assert owner is not None
        statuses: list[int] = []
        for _ in range(3):
            sizes = [10, *(draw.choice((10, 3000, 9000, 39_000)) for _ in range(7))]
            asked = [send_file(world, b"x" * size, ann, size > 10 and draw.random() < 0.5) for size in sizes]
            for answer in await asyncio.gather(*asked):
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    code, message = told(answer)
                    assert (answer.status_code, code) == (429, "quota_exceeded")
                    assert "DELETE /v1/files/ID" in message and answer.headers["retry-after"] == "60"
                    assert answer.headers["x-should-retry"] == "false"
            late = await send_file(world, b"x" * most, ann, chunked=True)  # is only seen to be too large
            assert late.status_code == 429 and told(late)[0] == "quota_exceeded"
            page = await store.files.page(owner.id, None, 100, True)
            assert page is not None and len(page.records) <= most_files
            assert sum(file.bytes for file in page.records) <= most
            assert len(list(world.state.settings.files.iterdir())) == len(page.records) + 1
            for file in draw.sample(page.records, len(page.records) // 2 + 1):
                gone = await world.http.delete(
                    f"/v1/files/{file.id}", headers={"authorization": f"Bearer {ann}"}
                )
                assert gone.status_code == 200
        assert {200, 429} == set(statuses)

    play(story, max_bytes_tenant=most, max_files_tenant=most_files)


def test_an_upload_that_has_no_room_is_refused_before_its_body(play: Play) -> None:
    async def story(world: World) -> None:
        for path in ("/v1/files", "/v1/adapters"):
            sent: list[Any] = []

            async def receive() -> Any:
                raise AssertionError("the body was read")

            async def send(message: Any) -> None:
                sent.append(message)  # noqa: B023

            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
                "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
                "headers": [(b"host", b"localhost"), (b"content-length", b"900000")], "root_path": "",
                "client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {},
            }  # fmt: skip
            await world.app(scope, receive, send)
            assert sent[0]["status"] == 429

    play(story, max_bytes_tenant=500_000)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/adapters"])
@pytest.mark.parametrize("told", [True, False])
def test_an_upload_that_the_disk_has_no_room_for_is_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch, path: str, told: bool
) -> None:
    """With a length before its body, else as soon as what has come is too much; and nothing is left of it."""
    free = [DISK_RESERVE + 2_000_000]

    def usage(folder: Any) -> Any:
        return type("Usage", (), {"free": free[0]})

    monkeypatch.setattr(quotas.shutil, "disk_usage", usage)

    async def story(world: World) -> None:
        before = sorted(world.state.settings.state.rglob("*"))
        read = [0]

        async def form() -> Any:
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            for _ in range(50):
                read[0] += 1
                yield bytes(100_000)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        if told:
            headers["content-length"] = "5000100"
        answer = await world.http.post(path, content=form(), headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (507, "disk_full")
        assert "1.91 MiB are free" in error["message"] and "256 MiB" in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert read[0] < 40
        assert sorted(world.state.settings.state.rglob("*")) == before
        assert await upload(world), "a small one fits"
        free[0] = 0
        with pytest.raises(openai.InternalServerError, match="0 bytes are free"):
            await upload(world)

    play(story)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/adapters"])
def test_an_upload_of_unknown_length_is_read_no_further_than_there_is_room(play: Play, path: str) -> None:
    piece, sent = b"x" * 500_000, [0]
    field = b"file" if path == "/v1/files" else b"weights"
    form = b'--x\r\nContent-Disposition: form-data; name="' + field + b'"; filename="w"\r\n\r\n'

    async def pieces() -> Any:
        yield form
        for _ in range(40):
            sent[0] += len(piece)
            yield piece
            await asyncio.sleep(0)
        yield b"\r\n--x--\r\n"

    async def story(world: World) -> None:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = await world.http.post(path, content=pieces(), headers=headers)
        assert (answer.status_code, told(answer)[0]) == (429, "quota_exceeded")
        assert "DELETE /v1/files/ID" in told(answer)[1] and sent[0] < 6_000_000

    play(story, max_bytes_tenant=3_000_000)


def test_adapters_count_and_go_without_a_trace_where_there_is_no_room(play: Play, tmp_path: Any) -> None:
    folder, weights = tmp_path / "root" / "a", b"\x00" * 30_000
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(weights)

    async def story(world: World) -> None:
        async def put(name: str) -> httpx2.Response:
            files = {"config": (folder / "adapter_config.json").read_bytes(), "weights": weights}
            return await world.http.post("/v1/adapters", data={"name": name}, files=files)

        answers = await asyncio.gather(*(put(f"name-{number}") for number in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        by_path = await world.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "by-path", "lora_path": "a"}
        )
        assert (by_path.status_code, told(by_path)[0]) == (429, "quota_exceeded")
        kept = list((world.state.store.folder / "adapters").iterdir())
        assert len(kept) == 2, "what was refused is gone"
        refused = await send_file(world, b"x" * 30_000, "k")
        assert (refused.status_code, told(refused)[0]) == (429, "quota_exceeded")
        name = next(f"name-{i}" for i, answer in enumerate(answers) if answer.status_code == 200)
        assert (await world.http.delete(f"/v1/models/{name}")).status_code == 200
        assert (await send_file(world, b"x" * 30_000, "k")).status_code == 200

    play(story, max_bytes_tenant=70_000, adapter_root=tmp_path / "root")


def test_jobs_at_once_never_pass_the_quota_together(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        made = await asyncio.gather(
            *(create(world, training_file=file) for _ in range(7)), return_exceptions=True
        )
        refused = [one for one in made if isinstance(one, BaseException)]
        assert len(made) - len(refused) == 3
        for error in refused:
            assert getattr(error, "code", None) == "quota_exceeded" and "cancel one" in str(error)
        jobs = world.client().fine_tuning.jobs
        await jobs.cancel(next(one.id for one in made if not isinstance(one, BaseException)))
        await create(world, training_file=file)

    play(story, max_jobs_tenant=3)


def test_what_is_kept_of_a_training_run_fills_nobody_elses_room(play: Play) -> None:
    async def story(world: World) -> None:
        secrets = [(await world.state.store.tenants.create_key(name))[1] for name in ("ann", "bob")]
        ann, bob = (Caller(world, secret) for secret in secrets)
        lines = b'{"prompt": "a", "completion": "b"}\n' * 300
        file = (await send_file(world, lines, secrets[0])).json()["id"]
        run, other = await ann.run(), await bob.run()

        async def passes(caller: Caller, run: str, number: int) -> Any:
            return await caller.post("forward_backward", passed(run, number, (5,) * 400))

        number = 1
        while (answer := await passes(ann, run, number)).status_code == 200:
            number += 1
            assert number < 20, "a bound of 40 kB, and 5 kB for each pass"
        code, message = told(answer)
        assert (answer.status_code, code) == (429, "quota_exceeded") and message.count(". ") == 0
        assert number > 3 and "may have 40000" in message
        for again in range(1, 4):
            assert "error" not in await bob.result(await passes(bob, other, again))
        deleted = await world.http.delete(
            f"/v1/files/{file}", headers={"authorization": f"Bearer {secrets[0]}"}
        )
        assert deleted.status_code == 200
        assert (await passes(ann, run, number)).status_code == 200, "its number was not lost"
        await ann.result(await ann.post("unload_model", {"model_id": run}))
        owner = await world.state.store.tenants.of_key(secrets[0])
        assert owner is not None
        kinds = {one.kind for one in await world.state.store.tenants.kept(owner.id)}
        assert "tinker_runs" in kinds and "tinker_requests" not in kinds

    play(story, max_bytes_tenant=40_000)
