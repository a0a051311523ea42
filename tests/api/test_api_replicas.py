"""Two servers on one database and one store of artifacts: what one makes, the other answers with."""

import asyncio
import json
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import fake_engine
from coserve.serve.adapter_registry import following
from coserve.serve.artifacts import objects
from coserve.serve.store import leases
from coserve.wire.messages import AddAdapter, JobSpec
from object_store import URL, ObjectStoreServer, object_store
from serving import SECONDS, World, world
from tinkering import Caller, passed
from training import Trainer, create, started

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import endpoint_picker

Story = Callable[[World, World], Coroutine[Any, Any, None]]


def tell(story: Story, folder: Path, artifacts: str, **settings: Any) -> None:
    """Runs a story of two servers, each with an engine and a state folder of its own."""

    async def whole() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(SECONDS):
            pair = []
            for name in "ab":
                (state := folder / name / "state").mkdir(parents=True)
                if name == "b":
                    (state / "coserve.db").symlink_to(folder / "a" / "state" / "coserve.db")
                fields = {"artifacts": artifacts, "adapter_root": folder, **settings}
                pair.append(await stack.enter_async_context(world(folder / name, {}, fields)))
            await story(*pair)

    asyncio.run(whole())


def make_adapter(folder: Path, rank: int = 4) -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    header = b"{}      "
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder.name


async def ask(it: World, model: str) -> httpx2.Response:
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    return await it.http.post("/v1/completions", json=body)


async def post(it: World, path: str, **body: Any) -> int:
    return (await it.http.post(path, json=body)).status_code


async def load(it: World, name: str, folder: str, **more: Any) -> int:
    return await post(it, "/v1/load_lora_adapter", lora_name=name, lora_path=folder, **more)


def answered_by(it: World) -> str | None:
    return it.submits()[-1].adapter


def test_what_one_server_imports_the_other_answers_with_pins_and_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.05)

    async def story(a: World, b: World) -> None:
        assert await load(a, "poet", make_adapter(tmp_path / "one")) == 200
        for it in (b, a, b):
            assert (await ask(it, "poet")).status_code == 200
        for path, more in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            answer = await b.http.post(path, json={"model": "poet", **more})
            assert answer.headers.get("x-coserve-version") == answered_by(b), path
        first = answered_by(a)
        assert first is not None and answered_by(b) == first
        folder = b.state.store.adapter_folder(first)
        assert b.engine.adapters[first] == str(folder) and folder.is_relative_to(tmp_path / "b")
        assert sum(isinstance(one, AddAdapter) for one in b.engine.said) == 1

        assert (await b.http.post("/v1/adapters/poet/pin")).status_code == 200
        await a.until(lambda: first in a.engine.pinned)
        assert (await a.http.delete("/v1/adapters/poet/pin")).status_code == 200
        await b.until(lambda: first not in b.engine.pinned)

        assert await load(b, "poet", make_adapter(tmp_path / "two", rank=8), load_inplace=True) == 200
        assert (await ask(a, "poet")).status_code == 200
        second = answered_by(a)
        assert second not in (None, first)
        config = (await a.http.get("/v1/adapters/poet/config")).json()
        assert config["r"] == 8

        assert await post(b, "/v1/unload_lora_adapter", lora_name="poet") == 200
        assert (await ask(a, "poet")).status_code == 404 == (await ask(b, "poet")).status_code
        shared = tmp_path / "common" / "adapters"
        await a.until(lambda: not (shared / str(second)).exists())

    tell(story, tmp_path, str(tmp_path / "common"))


def test_what_one_server_trains_the_other_answers_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        trainer = Trainer(a)
        job: Any = await create(a)
        await a.until(lambda: bool(started(a)))
        await trainer.start(job.id, steps=2)
        await trainer.step(job.id, 1)
        await trainer.checkpoint(job.id, 1)
        (checkpoint,) = (await b.client().fine_tuning.jobs.checkpoints.list(job.id)).data
        assert (await ask(b, checkpoint.fine_tuned_model_checkpoint)).status_code == 200
        assert answered_by(b) == checkpoint.id
        await trainer.step(job.id, 2)
        await trainer.checkpoint(job.id, 2)
        await trainer.end(job.id, "succeeded", 2)
        done = await b.client().fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded" and done.fine_tuned_model is not None
        assert (await ask(b, done.fine_tuned_model)).status_code == 200
        assert (await b.client().files.content(done.result_files[0])).text.startswith("step,")
        data = (await b.client().files.content(job.training_file)).content
        assert data == (await a.client().files.content(job.training_file)).content
        # And it trains on what the other one has taken.
        more: Any = await b.client().fine_tuning.jobs.create(
            model=done.fine_tuned_model, training_file=job.training_file
        )
        await b.until(lambda: bool(started(b)))
        spec = next(one for one in b.engine.said if isinstance(one, JobSpec) and one.job == more.id)
        assert Path(spec.data).read_bytes() == data and spec.data.startswith(str(tmp_path / "b"))
        assert spec.start_from is not None and len(list(Path(spec.start_from).iterdir())) == 2

    with object_store(monkeypatch):
        tell(story, tmp_path, URL)


def test_nothing_that_was_acknowledged_is_lost_while_the_store_is_full_or_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RETRIES", 0)

    async def story(a: World, b: World, store: ObjectStoreServer) -> None:
        make_adapter(tmp_path / "one")
        assert await load(a, "kept", "one") == 200
        trainer = Trainer(a)
        job: Any = await create(a)
        await a.until(lambda: bool(started(a)))
        await trainer.start(job.id, steps=1)
        await trainer.step(job.id, 1)

        store.refuses = frozenset({"PUT", "GET"})
        refused = await a.http.post("/v1/load_lora_adapter", json={"lora_name": "no", "lora_path": "one"})
        assert refused.status_code == 503
        assert "artifact store s3://bucket/prefix cannot be used now" in refused.json()["error"]["message"]
        upload = {"file": ("t.jsonl", b'{"prompt": "a", "completion": "b"}\n')}
        put = await a.http.post("/v1/files", files=upload, data={"purpose": "fine-tune"})
        assert put.status_code == 503 and put.json()["error"]["code"] == "storage_unavailable"
        assert (await ask(a, "kept")).status_code == 200  # its copy is here
        assert (await ask(b, "kept")).status_code == 503
        assert (await ask(b, "tiny")).status_code == 200
        names = [one.filename for one in (await a.client().files.list()).data]
        assert len(names) == 1 and (await ask(a, "no")).status_code == 404
        ending = asyncio.create_task(_end(trainer, job.id))
        await asyncio.sleep(0.2)
        assert (await b.client().fine_tuning.jobs.retrieve(job.id)).status == "running"
        store.refuses = frozenset()
        await ending
        done = await b.client().fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded"
        for name in ("kept", done.fine_tuned_model or ""):
            assert (await ask(b, name)).status_code == 200

    with object_store(monkeypatch) as server:
        tell(lambda a, b: story(a, b, server), tmp_path, URL)


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of a metric."""
    families = text_string_to_metric_families(text)
    return [(one.labels, one.value) for family in families for one in family.samples if one.name == name]


def test_metrics_have_the_names_that_routers_read(tmp_path: Path) -> None:
    async def story(a: World, b: World) -> None:
        make_adapter(tmp_path / "one")
        for name in ("poet", "with,comma"):
            assert await load(a, name, "one") == 200
        assert (await a.http.post("/v1/adapters/poet/pin")).status_code == 200
        a.engine.step_seconds = 0.05
        body = {"model": "poet", "prompt": "x", "max_tokens": 50, "ignore_eos": True}
        asked = [asyncio.create_task(a.http.post("/v1/completions", json=body)) for _ in range(3)]
        await a.until(lambda: len(a.engine.running) == 3)
        await a.until(lambda: a.state.link.stats is not None and a.state.link.stats.paging.pinned)
        text = (await a.http.get("/metrics")).text
        assert samples(text, "vllm:num_requests_running") == [({"model_name": "tiny"}, 3.0)]
        assert samples(text, "vllm:num_requests_waiting") == [({"model_name": "tiny"}, 0.0)]
        ((labels, since),) = samples(text, "vllm:lora_requests_info")
        assert labels == {
            "max_lora": str(a.engine.max_running),
            "running_lora_adapters": "poet",
            "waiting_lora_adapters": "",
        }
        assert abs(since - time.time()) < SECONDS
        loaded = {"adapter_name": "poet", "level": "gpu", "pinned": "true", "rank": "0"}
        assert samples(text, "vllm:lora_adapter_loaded") == [(loaded, 1.0)]
        assert samples(text, "vllm:num_gpu_loaded_lora_adapters") == [({"model_name": "tiny"}, 2.0)]
        assert samples(text, "vllm:lora_adapter_load_seconds_count") == [({}, 2.0)]
        ((labels, _),) = samples(text, "vllm:cache_config_info")
        assert labels["block_size"] == str(a.state.settings.engine.page_size)
        assert samples(text, "vllm:kv_cache_usage_perc")[0][1] >= 0.0
        found = endpoint_picker.described(text)
        assert (found.load, found.waiting, found.adapters) == (3.0, 0.0, {"poet"})
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await a.until(lambda: not a.state.catalog.used)
        text = (await a.http.get("/metrics")).text
        ((labels, _),) = samples(text, "vllm:lora_requests_info")
        assert labels["running_lora_adapters"] == ""
        assert endpoint_picker.described(text).adapters == {"poet"}

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_picker_loads_no_adapter_twice_without_need_and_spreads_a_hot_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "SPEAK_SECONDS", 0.05)

    async def story(a: World, b: World) -> None:
        names = [f"poet-{i}" for i in range(6)]
        make_adapter(tmp_path / "one")
        for name in names:
            assert await load(a, name, "one") == 200
        worlds = {"a": a, "b": b}
        for it in worlds.values():
            await it.engine.die()
            await it.engine.start()  # which has none of them
            await it.state.link.wait_ready(SECONDS)

        async def read() -> dict[str, endpoint_picker.Endpoint]:
            return {
                name: endpoint_picker.described((await it.http.get("/metrics")).text)
                for name, it in worlds.items()
            }

        def loaded() -> int:
            return sum(isinstance(one, AddAdapter) for it in worlds.values() for one in it.engine.said)

        before = loaded()
        for _ in range(3):
            for name in names:
                picked = endpoint_picker.pick(name, await read())
                assert (await ask(worlds[picked], name)).status_code == 200
            for it in worlds.values():  # statistics come once a second
                seen = it.state.link.stats
                await it.until(lambda it=it, seen=seen: it.state.link.stats is not seen)
        assert loaded() - before == len(names)
        assert all(any(isinstance(one, AddAdapter) for one in it.engine.said) for it in worlds.values())

        endpoints = await read()
        hot = [endpoint_picker.pick("poet-0", endpoints) for _ in range(12)]
        assert 4 <= hot.count("a") <= 8

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_key_that_comes_to_two_servers_creates_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks one server, gives up as that hangs, and asks the other one; then the first goes on."""

    async def story(a: World, b: World) -> None:
        hangs, begun = asyncio.Event(), asyncio.Semaphore(0)

        def late(put: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
            async def wrapped(what: Any) -> Any:
                begun.release()
                await hangs.wait()
                return await put(what)

            return wrapped

        files, adapters = a.state.store.files, a.state.store.adapters._artifacts
        monkeypatch.setattr(files, "_put", late(files._put))
        monkeypatch.setattr(adapters, "put", late(adapters.put))

        async def send(it: World, key: str, size: int = 1) -> httpx2.Response:
            keyed = {"Idempotency-Key": key}
            if key == "adapter":
                made = {name: (tmp_path / "one" / name).read_bytes() for name in parts}
                files = {part: (name, made[name]) for name, part in parts.items()}
                return await it.http.post("/v1/adapters", data={"name": "poet"}, files=files, headers=keyed)
            file = {"file": (f"{key}.jsonl", b'{"prompt": "a", "completion": "b"}\n' * size)}
            return await it.http.post("/v1/files", data={"purpose": "fine-tune"}, files=file, headers=keyed)

        parts = {"adapter_config.json": "config", "adapter_model.safetensors": "weights"}
        make_adapter(tmp_path / "one")
        asked = {key: asyncio.create_task(send(a, key)) for key in ("same", "other", "adapter")}
        for _ in asked:
            await begun.acquire()
        told = {key: await send(b, key, 1 + (key == "other")) for key in asked}
        assert (await b.http.delete("/v1/models/poet")).status_code == 200
        hangs.set()
        replies = {key: await task for key, task in asked.items()}
        assert {key: reply.status_code for key, reply in told.items()} == dict.fromkeys(asked, 200)
        for key in ("same", "adapter"):
            assert replies[key].status_code == 200, replies[key].text
            assert replies[key].json() == told[key].json()
            assert replies[key].headers["idempotent-replayed"] == "true"
        assert replies["other"].status_code == 422, replies["other"].text
        names = [one.filename for one in (await a.client().files.list()).data]
        assert sorted(names) == ["other.jsonl", "same.jsonl"]
        assert (await ask(a, "poet")).status_code == 404, "what was deleted comes back"

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_run_of_tinker_clients_tells_other_servers_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        run = await here.run()
        step, proto = {"model_id": run, "seq_id": 1}, {"content-type": "application/x-protobuf"}
        tried = [
            await there.post("get_info", {"model_id": run}),
            await there.post("optim_step", {**step, "adam_params": {}}),
            await there.post("forward_backward", passed(run, 1), **proto),
            await there.post("save_weights", {**step, "path": "x"}),
            await there.post("unload_model", {"model_id": run}),
        ]
        polled = await there.post("retrieve_future", {"request_id": f"{run}:0"})
        assert polled.status_code == 408 and polled.json()["type"] == "try_again", "clients give up at 409"
        for reply in tried:
            assert reply.status_code == 409, reply.text
            assert "is open on another server" in reply.text
        foreign = await there.post("get_info", {"model_id": "other:train:0"})
        assert foreign.status_code == 404
        others, looks = b.state.store.leases.of_others, list[str]()

        async def late(kind: str) -> Any:  # its lease had ended at the first look, and is renewed then
            looks.append(kind)
            return frozenset() if kind == "tinker" and looks.count(kind) == 1 else await others(kind)

        monkeypatch.setattr(b.state.store.leases, "of_others", late)
        assert (await there.post("get_info", {"model_id": run})).status_code == 409
        assert (await here.post("get_info", {"model_id": run})).status_code == 200
        await here.result(await here.post("unload_model", {"model_id": run}))
        while (gone := await there.post("get_info", {"model_id": run})).status_code == 409:
            await asyncio.sleep(0.05)  # until its lease is given back
        assert gone.status_code == 404 and "make a new one from a saved state" in gone.text

    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    tell(story, tmp_path, str(tmp_path / "common"))


async def _end(trainer: Trainer, job: str) -> None:
    await trainer.checkpoint(job, 1)
    await trainer.end(job, "succeeded", 1)


def test_a_server_that_had_no_store_puts_what_it_has_once_it_gets_one(tmp_path: Path) -> None:
    async def alone() -> None:
        async with world(tmp_path / "a", {}, {"adapter_root": tmp_path}) as it:
            assert await load(it, "poet", make_adapter(tmp_path / "one")) == 200

    async def together() -> None:
        fields = {"artifacts": str(tmp_path / "common")}
        async with world(tmp_path / "a", {}, fields) as it:
            found = await it.state.store.adapters.find("local", "poet", "tiny")
            assert found is not None
            await it.until((tmp_path / "common" / found.path / "artifact.json").exists)
            (folder := it.state.store.folder_of(found)).rename(tmp_path / "gone")
            assert (await ask(it, "poet")).status_code == 200 and folder.exists()

    (tmp_path / "a").mkdir()
    asyncio.run(alone())
    asyncio.run(together())
