"""Models, adapters by path, keys and tenants, health: all that is not an answer or a job."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from coserve.serve.adapter_registry import registry
from coserve.serve.routes import health
from coserve.wire.messages import AddAdapter, Fault, PinAdapter, RemoveAdapter
from serving import Play, World


def make_adapter(folder: Path) -> Path:
    """Files that look like an adapter to everybody but an engine."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    header = b"{}      "
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "code.py").write_text("raise SystemExit")
    return folder


async def load(world: World, name: str, path: str, key: str = "k") -> httpx2.Response:
    body = {"lora_name": name, "lora_path": path}
    return await world.http.post(
        "/v1/load_lora_adapter", json=body, headers={"authorization": f"Bearer {key}"}
    )


async def unload(world: World, name: str) -> httpx2.Response:
    return await world.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def ask(world: World, model: str, **more: Any) -> Any:
    return await world.client().completions.create(model=model, prompt="x", **{"max_tokens": 1, **more})


def commands(world: World, kind: type) -> list[Any]:
    return [command for command in world.engine.said if isinstance(command, kind)]


def test_the_base_is_a_model(play: Play) -> None:
    async def story(world: World) -> None:
        (model,) = (await world.client().models.list()).data
        assert model.id == "tiny" and model.owned_by == "coserve"
        card: Any = (await world.client().models.retrieve("tiny")).model_dump()
        assert card["root"] == "tiny" and card["parent"] is None and card["max_model_len"] == 2048
        with pytest.raises(openai.NotFoundError):
            await world.client().models.retrieve("org/other")
        with pytest.raises(openai.PermissionDeniedError):
            await world.client().models.delete("tiny")

    play(story)


def test_adapters_come_and_go(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        answer = await load(world, "mine", "one")
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'mine' added successfully."
        assert [model.id for model in (await world.client().models.list()).data] == ["tiny", "mine"]
        card: Any = (await world.client().models.retrieve("mine")).model_dump()
        assert (card["root"], card["parent"]) == ("tiny", "tiny")
        await ask(world, "mine")
        (loaded,) = commands(world, AddAdapter)
        assert world.submits()[0].adapter == loaded.key
        copied = Path(loaded.path)
        assert sorted(file.name for file in copied.iterdir()) == [
            "adapter_config.json", "adapter_model.safetensors",
        ]  # fmt: skip
        assert copied.is_relative_to(world.state.store.folder)
        again = await load(world, "mine", "one")
        assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_already_loaded"
        assert (await load(world, "tiny", "one")).status_code == 400
        assert (await unload(world, "mine")).text == "Success: LoRA adapter 'mine' removed successfully."
        assert commands(world, RemoveAdapter) and not copied.exists()
        assert (await unload(world, "mine")).status_code == 404
        with pytest.raises(openai.NotFoundError):
            await ask(world, "mine")
        assert (await load(world, "mine", str(tmp_path / "root" / "one"))).status_code == 200
        deleted = await world.client().models.delete("mine")
        assert deleted.deleted and deleted.id == "mine"
        assert not list((world.state.store.folder / "adapters").iterdir())

    play(story, adapter_root=tmp_path / "root")


def test_adapters_travel_over_http(play: Play, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one")
    config, weights = (
        (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
    )

    async def story(world: World) -> None:
        async def upload(name: str, config: bytes, weights: bytes) -> httpx2.Response:
            files = {"config": ("x", config), "weights": ("y", weights)}
            return await world.http.post("/v1/adapters", data={"name": name}, files=files)

        answer = await upload("team/mine", config, weights)
        assert answer.status_code == 200 and answer.json()["parent"] == "tiny"
        await ask(world, "team/mine")
        for part, content in (("config", config), ("weights", weights)):
            assert (await world.http.get(f"/v1/adapters/team%2Fmine/{part}")).content == content
        assert (await world.http.get("/v1/adapters/team%2Fmine/code")).status_code == 404
        for name in ("tiny", "other"):
            assert (await world.http.get(f"/v1/adapters/{name}/config")).status_code == 404
        assert (await upload("team/mine", config, weights)).json()["error"]["param"] == "name"
        assert (await upload(" x", config, weights)).status_code == 400
        assert (await upload("x", b"[]", weights)).status_code == 400
        assert (await upload("x", config, b"a" * 101)).status_code == 413
        assert len((await world.client().models.list()).data) == 2

    play(story, max_file_bytes=100)


def test_only_what_lies_below_the_root_is_read(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "elsewhere")
    root = make_adapter(tmp_path / "root" / "good").parent
    (root / "link").symlink_to(tmp_path / "elsewhere")
    linked = root / "linked"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(tmp_path / "elsewhere" / name)
    (make_adapter(root / "folder") / "adapter_model.safetensors").unlink()
    (root / "folder" / "adapter_model.safetensors").mkdir()
    (root / "half").mkdir()
    (root / "half" / "adapter_config.json").write_text("{")

    async def story(world: World) -> None:
        told = set()
        for path in (
            "../elsewhere",
            str(tmp_path / "elsewhere"),
            "link",
            "nothing",
            "a\x00b",
            "good/code.py",
        ):
            answer = await load(world, "x", path)
            assert answer.status_code == 400
            told.add(answer.json()["error"]["message"].replace(repr(path), "…"))
        assert len(told) == 1  # what exists outside cannot be told from what does not
        for path in ("linked", "half", "folder"):
            assert (await load(world, "x", path)).status_code == 400
        assert not commands(world, AddAdapter)
        assert not list((world.state.store.folder / "adapters").iterdir())

    play(story, adapter_root=root)


def test_without_a_root_nothing_is_loaded_by_path(play: Play) -> None:
    async def story(world: World) -> None:
        assert (await load(world, "x", "y")).status_code == 403

    play(story)


@pytest.mark.parametrize("place", ["/adapter_config.json: ", ": "])
def test_an_adapter_that_the_engine_refuses_leaves_nothing_behind(
    play: Play, tmp_path: Path, place: str
) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        class Everything(dict[str, Fault]):
            def get(self, key: str, default: Any = None) -> Fault:
                folder = world.state.store.folder / "adapters" / key
                return Fault("AdapterMismatch", f"{folder}{place}layer 3 has another shape")

        world.engine.refusals = Everything()
        answer = await load(world, "x", "one")
        said = answer.json()["error"]["message"]  # and nothing of where the server keeps things
        assert answer.status_code == 400 and said == f"{place[1:].lstrip()}layer 3 has another shape"
        assert len((await world.client().models.list()).data) == 1
        assert not list((world.state.store.folder / "adapters").iterdir())

    play(story, adapter_root=tmp_path / "root")


def test_an_adapter_in_use_is_drained_before_it_goes(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        await load(world, "mine", "one")
        using = asyncio.create_task(ask(world, "mine", max_tokens=30))
        await world.until(lambda: bool(world.engine.running))
        going = asyncio.create_task(unload(world, "mine"))
        await asyncio.sleep(0.02)
        with pytest.raises(openai.NotFoundError):
            await ask(world, "mine")
        assert not going.done() and not commands(world, RemoveAdapter)
        assert (await using).usage.completion_tokens == 30
        assert (await going).status_code == 200 and commands(world, RemoveAdapter)

    play(story, adapter_root=tmp_path / "root", engine={"step_seconds": 0.005})


def test_an_adapter_that_stays_in_use_stays(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        await load(world, "mine", "one")
        using = asyncio.create_task(ask(world, "mine", max_tokens=60))
        await world.until(lambda: bool(world.engine.running))
        answer = await unload(world, "mine")
        assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "adapter_in_use"
        await using
        await ask(world, "mine")

    play(story, adapter_root=tmp_path / "root", drain_seconds=0.05, engine={"step_seconds": 0.005})


def test_adapters_of_the_start_are_everybodys(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "one")

    async def story(world: World) -> None:
        assert [model.id for model in (await world.client().models.list()).data] == ["tiny", "given"]
        await ask(world, "given")
        assert commands(world, AddAdapter)[0].path == str(tmp_path / "one")
        assert (await unload(world, "given")).status_code == 403

    play(story, adapters={"given": str(tmp_path / "one")})


def test_tenants_see_their_own_only(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        keys = {name: (await world.state.store.tenants.create_key(name))[1] for name in ("ann", "bob")}
        for bad in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {keys['ann']}"}):
            answer = await world.http.get("/v1/models", headers=bad)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert (await load(world, "mine", "one", keys["ann"])).status_code == 200
        ann, bob = world.client(keys["ann"]), world.client(keys["bob"])
        assert [model.id for model in (await ann.models.list()).data] == ["tiny", "mine"]
        assert [model.id for model in (await bob.models.list()).data] == ["tiny"]
        told = []
        for name in ("mine", "none"):
            with pytest.raises(openai.NotFoundError) as refused:
                await bob.models.retrieve(name)
            told.append((refused.value.status_code, refused.value.message.replace(name, "…")))
            with pytest.raises(openai.NotFoundError):
                await bob.models.delete(name)
            with pytest.raises(openai.NotFoundError):
                await bob.completions.create(model=name, prompt="x")
        assert told[0] == told[1]
        await ann.models.delete("mine")

    play(story, adapter_root=tmp_path / "root")


def test_keys_may_be_required_on_loopback_and_pages_of_other_sites_are_not_local(play: Play) -> None:
    async def required(world: World) -> None:
        assert (await world.http.get("/v1/models")).status_code == 401

    async def page(world: World) -> None:
        foreign = {"origin": "http://example.org"}
        assert (await world.http.get("/v1/models", headers=foreign)).status_code == 403
        own = {"origin": "http://localhost"}
        assert (await world.http.get("/v1/models", headers=own)).status_code == 200

    play(required, require_keys=True)
    play(page)


def test_adapters_of_another_base_are_not_there(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def before(world: World) -> None:
        assert (await load(world, "mine", "one")).status_code == 200

    async def other(world: World) -> None:
        assert [model.id for model in (await world.client().models.list()).data] == ["large"]
        for unknown in (
            world.client().models.retrieve("mine"),
            world.client().models.delete("mine"),
            ask(world, "mine"),
        ):
            with pytest.raises(openai.NotFoundError):
                await unknown
        assert (await unload(world, "mine")).status_code == 404
        assert (await load(world, "mine", "one")).status_code == 400  # the name is taken all the same

    async def after(world: World) -> None:
        assert [model.id for model in (await world.client().models.list()).data] == ["tiny", "mine"]

    play(before, adapter_root=tmp_path / "root")
    play(other, adapter_root=tmp_path / "root", name="large")
    play(after, adapter_root=tmp_path / "root")


def test_what_vllms_clients_send_beside_the_name(play: Play, tmp_path: Path) -> None:
    make_adapter(tmp_path / "root" / "one")

    async def story(world: World) -> None:
        post = world.http.post
        body = {"lora_name": "a", "lora_path": "one"}
        refused = await post("/v1/load_lora_adapter", json={**body, "load_inplace": "yes"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "load_inplace"
        loaded = await post("/v1/load_lora_adapter", json={**body, "load_inplace": False})
        assert loaded.status_code == 200
        gone = await post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1})
        assert gone.status_code == 200

    play(story, adapter_root=tmp_path / "root")


def test_replaced_adapters_that_are_still_there_are_few(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count towards no quota. A replacement that fails takes no place."""
    make_adapter(tmp_path / "root" / "one")
    monkeypatch.setattr(registry, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(registry, "MOST_REPLACED", 2)

    async def story(world: World) -> None:
        async def replace(path: str = "one", name: str = "a") -> int:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
            return (await world.http.post("/v1/load_lora_adapter", json=body)).status_code

        assert [await replace() for _ in range(2)] == [200, 200], "the first name was free"
        assert await replace("nothing") == 400
        assert sorted(await asyncio.gather(*(replace() for _ in range(3)))) == [200, 429, 429]
        assert await replace() == 429 and await replace(name="b") == 429
        folders = [Path(one.path) for one in commands(world, AddAdapter)]
        assert len([folder for folder in folders if folder.exists()]) == 3

    play(story, adapter_root=tmp_path / "root")


def test_an_adapter_is_replaced_while_it_is_asked(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is of one version, the newest when it was asked or one that came since; none fails."""
    make_adapter(tmp_path / "root" / "one")
    monkeypatch.setattr(registry, "GRACE_SECONDS", 0.1)

    async def story(world: World) -> None:
        async def replace(**more: Any) -> httpx2.Response:
            body = {"lora_name": "a", "lora_path": "one", "load_inplace": True, **more}
            return await world.http.post("/v1/load_lora_adapter", json=body)

        def version() -> int:
            """The newest version's number."""
            return len(commands(world, AddAdapter)) - 1

        assert (await replace()).status_code == 200, "a name that is free is taken"
        assert (await world.http.post("/v1/adapters/a/pin")).status_code == 200
        keys = [commands(world, AddAdapter)[0].key]
        world.engine.script = lambda request, place: (
            10 + [one.key for one in commands(world, AddAdapter)].index(request.adapter)
        )
        done: list[tuple[int, str, int]] = []
        over = False

        async def keep_asking(number: int) -> None:
            while not over:
                before = len(keys) - 1
                answer = await ask(world, "a", max_tokens=3 + 4 * number, seed=1)
                done.append((before, answer.choices[0].text, version()))

        first = asyncio.create_task(ask(world, "a", max_tokens=600))
        await world.until(lambda: bool(world.submits()))
        asking = [asyncio.create_task(keep_asking(number)) for number in range(6)]
        for number in range(1, 9):
            assert (await replace()).status_code == 200
            keys.append(commands(world, AddAdapter)[-1].key)
            before = len(world.submits())
            await ask(world, "a")
            assert {one.adapter for one in world.submits()[before:]} >= {keys[number]}
            await asyncio.sleep(0.05)
            assert first.done() or keys[0] not in {one.key for one in commands(world, RemoveAdapter)}
        over = True
        await asyncio.gather(*asking)
        assert len(set(keys)) == 9 and len(done) > 20
        spoken = [world.told([10 + number]) for number in range(9)]
        for before, text, after in done:
            of = {number for number in range(9) if text and not text.replace(spoken[number], "")}
            assert any(before <= number <= after for number in of), (before, text, after)
        assert (await first).choices[0].finish_reason == "length"
        folders = [Path(one.path) for one in commands(world, AddAdapter)]
        await world.until(lambda: [folder.exists() for folder in folders] == [False] * 8 + [True])
        assert {one.key for one in commands(world, RemoveAdapter)} == set(keys[:-1])
        assert (await world.client().models.retrieve("a")).model_dump()["pinned"]
        (tmp_path / "root" / "one" / "adapter_model.safetensors").write_bytes(b"x")
        world.engine.script = lambda request, place: 20
        assert (await replace(lora_path="nothing")).status_code in (400, 404)
        assert (await replace(lora_name="tiny")).status_code == 400
        assert (await ask(world, "a")).choices, "a replacement that fails leaves the old one"

    play(story, adapter_root=tmp_path / "root")


def test_health_answers_head_as_it_answers_get(play: Play) -> None:
    async def story(world: World) -> None:
        for draining in (False, True):
            world.state.draining = draining
            for path in ("/health", "/health/ready"):
                whole, head = await world.http.get(path), await world.http.head(path)
                assert head.status_code == whole.status_code

    play(story)


def test_an_engine_that_hangs_is_told_of(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT_SECONDS", 1.5)  # an idle one says something every second

    async def becomes_ready(world: World) -> None:
        while (await world.http.get("/health/ready")).status_code != 200:  # a busy machine is silent too
            await asyncio.sleep(0.05)

    async def story(world: World) -> None:
        await asyncio.sleep(2.0)
        await becomes_ready(world)
        world.engine.hangs = True
        await world.until(lambda: world.state.link.silence > 1.5)
        silent = await world.http.get("/health/ready")
        assert silent.status_code == 503 and "no sign of life" in silent.json()["error"]["message"]
        assert (await world.http.get("/health")).json()["engine"] == "silent"
        assert "coserve_engine_up 0.0" in (await world.http.get("/metrics")).text
        world.engine.hangs = False
        await becomes_ready(world)

    play(story)


def test_a_supervisor_that_is_stopped_is_told_of_and_answers_go_on(play: Play) -> None:
    async def story(world: World) -> None:
        for silence, said, up in ((3.9, "ready", 1), (4.1, "silent", 0), (0.4, "ready", 1)):
            world.state.supervisor_silence = lambda silence=silence: silence
            for path in ("/health", "/health/ready"):
                answer = await world.http.get(path)
                assert answer.status_code == 200 and answer.json()["supervisor"] == said
            assert f"coserve_supervisor_up {up}.0" in (await world.http.get("/metrics")).text

    play(story)


def test_health_follows_the_engine(play: Play) -> None:
    async def story(world: World) -> None:
        assert (await world.http.get("/health/ready")).json() == {
            "status": "ok", "engine": "ready", "supervisor": "ready", "model": "tiny",
        }  # fmt: skip
        await world.engine.die()
        await world.until(lambda: not world.state.link.ready)
        away = await world.http.get("/health/ready")
        assert away.status_code == 503 and away.headers["retry-after"]
        assert (await world.http.get("/health")).json()["engine"] == "away"
        hello, world.state.link.hello = world.state.link.hello, None
        assert (await world.http.get("/health")).json()["engine"] == "starting"
        assert "the engine is starting" in (await world.http.get("/health/ready")).text
        world.state.link.hello = hello
        await world.engine.start()
        await world.until(lambda: world.state.link.ready)
        world.state.draining = True
        assert (await world.http.get("/health/ready")).json()["error"]["code"] == "draining"
        assert (await world.http.get("/health")).json()["status"] == "draining"
        assert (await world.http.post("/v1/completions", json={})).status_code == 503

    play(story)


def test_metrics_have_vllms_names(play: Play) -> None:
    async def story(world: World) -> None:
        await ask(world, "tiny", max_tokens=5)
        answer = await world.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        figures = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
        model = '{model_name="tiny"}'
        assert float(figures[f"coserve_generation_tokens_total{model}"]) == 5
        assert float(figures[f"coserve_prompt_tokens_total{model}"]) == len(world.submits()[0].prompt)
        done = 'coserve_request_success_total{finished_reason="length",model_name="tiny"}'
        assert float(figures[done]) == 1
        for name, count in (
            ("time_to_first_token_seconds", 1),
            ("inter_token_latency_seconds", 4),
            ("request_time_per_output_token_seconds", 1),
            ("e2e_request_latency_seconds", 1),
            ("request_queue_time_seconds", 1),
        ):
            assert float(figures[f"coserve_{name}_count{model}"]) == count, name
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "slo_attainment",
            "finetune_steps_total",
            "num_preemptions_total",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "engine_steps_total",
            "slo_met_total",
            "slo_missed_total",
            "slowdown_ratio",
            "answer_seconds_total",
            "answer_deferred_seconds_total",
        ):
            assert f"# TYPE coserve_{name}" in answer.text

    play(story)


def test_adapters_are_pinned_and_say_where_they_are(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        make_adapter(tmp_path / "root" / "one"), make_adapter(tmp_path / "root" / "two")
        await load(world, "one", "one"), await load(world, "two", "two")
        await ask(world, "one")
        await world.until(lambda: bool(world.state.link.resident))
        pinned = (await world.http.post("/v1/adapters/one/pin")).json()
        assert pinned["id"] == "one" and pinned["pinned"] and pinned["location"] == "memory"
        cards = {card["id"]: card for card in (await world.http.get("/v1/models")).json()["data"]}
        assert (cards["tiny"]["location"], cards["tiny"]["pinned"]) == (None, False)
        assert cards["one"]["pinned"] and not cards["two"]["pinned"]
        (command,) = commands(world, PinAdapter)
        assert command.pinned and world.engine.pinned == {command.key}
        await world.engine.die()
        await world.engine.start()
        await world.until(lambda: world.engine.pinned == {command.key})  # every engine to come keeps it
        unpinned = (await world.http.delete("/v1/adapters/one/pin")).json()
        assert not unpinned["pinned"] and world.engine.pinned == set()
        assert (await world.http.post("/v1/adapters/nobody/pin")).status_code == 404
        assert (await world.http.post("/v1/adapters/tiny/pin")).status_code == 403
        world.engine.refusals["pin"] = Fault("OutOfMemory", "pinned adapters may have 1 GiB")
        refused = await world.http.post("/v1/adapters/two/pin")
        assert refused.status_code == 400 and "1 GiB" in refused.json()["error"]["message"]
        assert not (await world.http.get("/v1/models/two")).json()["pinned"]

    play(story, adapter_root=tmp_path / "root")


@pytest.mark.parametrize(
    ("named", "is_other"),
    [
        ("some/Mistral-7B", True),
        ("/home/me/models/TINY/", False),
        ("org/tiny", False),
        ("", False),
        (7, False),
    ],
)
def test_an_adapter_that_names_another_base_says_so(
    named: object, is_other: bool, play: Play, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "root" / "one")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    said = f"names the base {named!r}, and this server's is 'tiny'"

    async def story(world: World) -> None:
        names = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
        files = {kind: (folder / name).read_bytes() for kind, name in names.items()}
        card = (await world.http.post("/v1/adapters", data={"name": "a"}, files=files)).json()
        assert (said in (card["warning"] or "")) == is_other and (card["warning"] is None) != is_other
        for known in ("a", "b"):
            if known == "b":
                await load(world, "b", "one")
            listed = (await world.http.get("/v1/models")).json()["data"]
            (found,) = [card for card in listed if card["id"] == known]
            assert (found["warning"] is not None) == is_other and found["warning"] == card["warning"]
            assert (await world.http.get(f"/v1/models/{known}")).json() == found
            assert [one["warning"] for one in listed if one["parent"] is None] == [None]
        await world.http.delete("/v1/models/b")
        loaded = (await load(world, "b", "one")).text
        assert loaded.startswith("Success: ") and (said in loaded) == is_other

        class Everything(dict[str, Fault]):
            def get(self, key: str, default: Any = None) -> Fault:
                return Fault("AdapterMismatch", "no such linear")

        world.engine.refusals = Everything()
        refused = (await load(world, "c", "one")).json()["error"]["message"]
        assert refused.startswith("no such linear") and (said in refused) == is_other

    play(story, adapter_root=tmp_path / "root")
