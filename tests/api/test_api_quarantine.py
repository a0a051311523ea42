"""Work that crashes engines, through the API: a job and a stream of one tenant, beside those of others."""

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coserve.core.request import Request
from coserve.serve.adapter_registry import registry
from coserve.serve.adapter_registry.imports import CONFIG, WEIGHTS, copy_adapter
from coserve.serve.store.records import Adapter
from coserve.serve.store.store import Store
from coserve.wire.messages import AddAdapter, JobSpec, JobStarted, JobStep, Numbered, RemoveAdapter
from serving import Play, World

BAD = 13  # the seed of a job that crashes engines
DATA = b"".join(b'{"prompt": "%d", "completion": " x"}\n' % i for i in range(12))


def test_a_job_that_crashes_engines_fails_and_another_goes_on(play: Play) -> None:
    async def story(world: World) -> None:
        client, engine = world.client(), world.engine
        file = await client.files.create(file=("t.jsonl", DATA), purpose="fine-tune")
        bad = await client.fine_tuning.jobs.create(model="tiny", training_file=file.id, seed=BAD)
        good = await client.fine_tuning.jobs.create(model="tiny", training_file=file.id)
        seen = 0
        statuses = ["queued", "queued"]
        while statuses != ["failed", "running"]:  # each new engine is given the good one again
            statuses = [(await client.fine_tuning.jobs.retrieve(job.id)).status for job in (bad, good)]
            for command in engine.said[seen:]:
                seen += 1
                if isinstance(command, JobSpec) and command.job == good.id:
                    # It trains as far as step 3.
                    number = 1 + len(engine.news)
                    started = JobStarted(good.id, 0, 9, 12, 60, 0, 0, 1, 1, 1e-3)
                    step = JobStep(good.id, engine.collapses + 1, 1.0, 5, 5, 1.0, 1e-3, 0.1)
                    engine.tell(Numbered(number, started))
                    engine.tell(Numbered(number + 1, step))
        failed = await client.fine_tuning.jobs.retrieve(bad.id)
        assert failed.error is not None and failed.error.code == "quarantined"
        assert "exit status 1" in failed.error.message and "coserve quarantine" in failed.error.message
        assert 2 <= engine.collapses <= 4
        (kept,) = await world.state.store.quarantine.list()
        assert (kept.kind, kept.subject, kept.tenant) == ("job", bad.id, "local")
        with Store(world.state.settings.state) as other:  # as the command line has it
            assert (await other.quarantine.release(bad.id)) == kept
            assert await other.quarantine.release(bad.id) is None
        assert (await client.fine_tuning.jobs.retrieve(bad.id)).status == "paused"
        await client.fine_tuning.jobs.resume(bad.id)

    def crashes(command: object) -> bool:
        return isinstance(command, JobSpec) and command.options["seed"] == BAD

    play(story, engine={"poison": crashes, "step_seconds": 0.001})


def test_a_stream_that_crashes_engines_ends_with_the_reason(play: Play) -> None:
    async def story(world: World) -> None:
        body = {"model": "tiny", "prompt": "bad", "max_tokens": 9, "stream": True, "temperature": 0}
        answer = await world.http.post("/v1/completions", json=body)
        assert answer.status_code == 200  # it had begun
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "quarantined"
        again = await world.http.post("/v1/completions", json=body)
        assert again.status_code == 400 and again.json()["error"]["code"] == "quarantined"
        fine = await world.http.post("/v1/completions", json={**body, "prompt": "good", "stream": False})
        assert fine.status_code == 200
        (kept,) = await world.state.store.quarantine.list()
        assert kept.kind == "request" and kept.details is not None and kept.details["prompt"]

    bad: list[tuple[int, ...]] = []

    def fatal(asked: Request, place: int) -> bool:
        bad.append(asked.prompt)
        return asked.prompt == bad[0] and place == 4

    play(story, engine={"fatal": fatal, "step_seconds": 0.001})


def upload(world: World, folder: Path) -> Coroutine[Any, Any, httpx2.Response]:
    files = {kind: (folder / name).read_bytes() for kind, name in (("config", CONFIG), ("weights", WEIGHTS))}
    return world.http.post("/v1/adapters", data={"name": "bad"}, files=files)


def make_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"weights")
    return folder


def test_an_import_that_crashes_engines_leaves_nothing_on_disk(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        answer = await upload(world, make_files(tmp_path / "one"))
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "quarantined"
        await world.state.link.news.settled()
        (kept,) = await world.state.store.quarantine.list()
        assert kept.kind == "adapter" and kept.reason == answer.json()["error"]["message"]
        assert not [*(world.state.store.folder / "adapters").iterdir()]

    play(story, engine={"poison": lambda command: isinstance(command, AddAdapter)})


def test_an_import_that_nobody_waits_for_leaves_nothing_on_disk(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        def heard(kind: type) -> bool:
            return any(isinstance(command, kind) for command in world.engine.said)

        world.engine.hangs = True
        sending = asyncio.create_task(upload(world, make_files(tmp_path / "one")))
        await world.until(lambda: heard(AddAdapter))
        sending.cancel()
        await world.until(lambda: heard(RemoveAdapter))
        world.engine.hangs = False
        await asyncio.gather(sending, return_exceptions=True)
        await world.until(lambda: not [*(world.state.store.folder / "adapters").iterdir()])

    play(story)


def test_an_import_given_up_while_it_is_copied_leaves_nothing_on_disk(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, copied = threading.Event(), threading.Event(), threading.Event()

    def slowly(source: Path, target: Path, most_bytes: int) -> None:
        begun.set()
        goes_on.wait(30)
        copy_adapter(source, target, most_bytes)
        copied.set()

    monkeypatch.setattr(registry, "copy_adapter", slowly)

    async def story(world: World) -> None:
        adapters = world.state.store.folder / "adapters"
        sending = asyncio.create_task(upload(world, make_files(tmp_path / "one")))
        await world.until(begun.is_set)
        sending.cancel()
        asyncio.get_running_loop().call_later(0.1, goes_on.set)  # whoever gives up waits for the copy to end
        await asyncio.gather(sending, return_exceptions=True)
        await world.until(lambda: copied.is_set() and not [*adapters.iterdir()])

    play(story)


def test_folders_of_imports_that_a_killed_server_left_are_swept(play: Play, tmp_path: Path) -> None:
    left = make_files(tmp_path / "state" / "adapters" / "adapter-left")
    named = make_files(tmp_path / "state" / "adapters" / "adapter-named")
    with Store(tmp_path / "state") as store:
        assert asyncio.run(store.adapters.add(Adapter("a", "named", named, "tiny", 0, "local")))

    async def story(world: World) -> None:
        assert named.exists() and not left.exists()

    play(story)
