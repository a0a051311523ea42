"""Work whose server hangs goes on at another one; what the first one writes afterwards changes nothing."""

import asyncio
from collections.abc import Set
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_api_batches import ended, jsonl, line, results, start
from test_api_replicas import tell

from coserve.serve.store import leases
from coserve.serve.store.leases import LeaseKey
from serving import SECONDS, World
from tinkering import Caller
from training import Trainer, create, started


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.2)


class Hang:
    """A server that does not renew its leases until it goes on. What it puts of jobs and of clients' runs
    waits for that, and what it writes about batches."""

    def __init__(self, it: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self._goes_on, self.waiting = asyncio.Event(), 0
        store = it.state.store
        renew, put, advance = store.leases.renew, store.artifacts.put, store.batches.advance

        async def hung() -> Set[LeaseKey]:
            return await renew() if self._goes_on.is_set() else frozenset()

        async def late_put(path: Path, replace: bool = False) -> None:
            if path.relative_to(store.folder).parts[0] in ("jobs", "tinker"):
                await self._wait()
            await put(path, replace)

        async def late_advance(*given: Any, **values: Any) -> Any:
            await self._wait()
            return await advance(*given, **values)

        monkeypatch.setattr(store.leases, "renew", hung)
        monkeypatch.setattr(store.artifacts, "put", late_put)
        monkeypatch.setattr(store.batches, "advance", late_advance)

    async def _wait(self) -> None:
        self.waiting += 1
        await self._goes_on.wait()

    def go_on(self) -> None:
        self._goes_on.set()


async def weights(it: World, name: str) -> bytes:
    reply = await it.http.get(f"/v1/adapters/{name}/weights")
    assert reply.status_code == 200, reply.text
    return reply.content


def test_jobs_and_batches_are_handed_over_and_their_old_server_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        follows, renew = asyncio.Event(), b.state.store.leases.renew

        async def later() -> Set[LeaseKey]:  # b takes nothing before
            await follows.wait()
            return await renew()

        monkeypatch.setattr(b.state.store.leases, "renew", later)
        await b.engine.die()
        b.engine._generations = count(9)  # no two servers' engines have the same name
        await b.engine.start()
        await b.state.link.wait_ready(SECONDS)
        old, new = Trainer(a), Trainer(b)
        a.say("old"), b.say("new")
        job = await create(a)
        await a.until(lambda: bool(started(a)))
        await old.start(job.id, steps=2)
        await old.step(job.id, 1)
        await old.checkpoint(job.id, 1)
        hang = Hang(a, monkeypatch)
        batch = await start(a, jsonl(line(0), line(1)))
        await a.until(lambda: hang.waiting)
        await old.step(job.id, 2)
        late = asyncio.create_task(old.checkpoint(job.id, 2))
        await a.until(lambda: hang.waiting == 2)
        follows.set()

        await b.until(lambda: bool(started(b)))
        assert started(b)[0].attempt == 2
        assert {one.name for one in Path(started(b)[0].folder).iterdir()} == {"step-000001"}
        await new.start(job.id, step=1, steps=2)
        await new.step(job.id, 2)
        published = await new.checkpoint(job.id, 2)
        await new.end(job.id, "succeeded", 2)
        done = await b.client().fine_tuning.jobs.retrieve(job.id)
        over = await ended(b, batch.id)
        assert (done.status, over.status, over.request_counts.completed) == ("succeeded", "completed", 2)
        answers = await results(b, over.output_file_id)

        hang.go_on()
        await late
        await old.end(job.id, "succeeded", 2)
        await a.until(lambda: not a.app.state.batches._tasks and not a.state.store.leases.subjects("job"))
        own = (published / "adapter_model.safetensors").read_bytes()
        for it in (a, b):
            again = await it.client().fine_tuning.jobs.retrieve(job.id)
            assert (again.status, again.fine_tuned_model) == ("succeeded", done.fine_tuned_model)
            assert await weights(it, again.fine_tuned_model or "") == own
            newest = (await it.client().fine_tuning.jobs.checkpoints.list(job.id)).data[0]
            assert newest.step_number == 2
            assert await weights(it, newest.fine_tuned_model_checkpoint) == own
            assert again.result_files == done.result_files
            assert (await ended(it, batch.id)).output_file_id == over.output_file_id
            assert await results(it, over.output_file_id) == answers
            assert {one["response"]["body"]["choices"][0]["text"] for one in answers} == {"new"}
            names = [one.purpose for one in (await it.client().files.list()).data]
            assert (names.count("batch_output"), names.count("fine-tune-results")) == (1, 1)
        told = (await a.client().fine_tuning.jobs.list_events(job.id)).data
        assert sum(one.message.startswith("Checkpoint created at step 2") for one in told) == 1
        kept = [one.name for one in (a.state.store.folder / "files").iterdir()]
        assert not [name for name in kept if batch.id.removeprefix("batch_") in name and ".2" not in name]

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_run_whose_server_hangs_is_lost_and_a_new_one_goes_on_from_its_newest_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        run = await here.run()
        saved = await here.result(
            await here.post("save_weights", {"model_id": run, "seq_id": 1, "path": "x"})
        )
        hang = Hang(a, monkeypatch)
        asked = {"model_id": run, "seq_id": 2, "adam_params": {}}
        while (told := await there.post("optim_step", asked)).status_code == 409:
            await asyncio.sleep(0.05)
        assert told.status_code == 400 and "its server is gone" in told.text
        assert f"{saved['path']}: create_training_client_from_state_with_optimizer" in told.text
        polled = await there.post("retrieve_future", {"request_id": f"{run}:2"})
        assert polled.json()["category"] == "server" and saved["path"] in polled.json()["error"]
        session = run.partition(":")[0]
        again = {"session_id": session, "model_seq_id": 7, "path": saved["path"], "optimizer": True}
        made = await there.result(await there.post("load_weights", again))
        stepped = {"model_id": made["model_id"], "seq_id": 1, "adam_params": {}}
        assert "metrics" in await there.result(await there.post("optim_step", stepped))

        late = asyncio.create_task(
            here.result(await here.post("save_weights", {"model_id": run, "seq_id": 2, "path": "late"}))
        )
        await a.until(lambda: hang.waiting)
        hang.go_on()
        assert "another server has taken over" in (await late)["error"]
        await a.until(lambda: not a.app.state.tinker.runs._open)
        while (gone := await here.post("get_info", {"model_id": run})).status_code == 409:
            await asyncio.sleep(0.05)  # it has not read yet that the run is lost
        assert (gone.status_code, "has told its client" in gone.text) == (400, True), gone.text
        paths = [row.tinker_path for row in (await a.state.store.tinker_checkpoints.page("local", 0.0))[0]]
        assert paths == [saved["path"]], "what a lost run saves has no row"

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_queued_job_goes_where_room_is(tmp_path: Path) -> None:
    async def story(a: World, b: World) -> None:
        first, second = await create(a), await create(a)
        await b.until(lambda: bool(started(b)))
        await a.until(lambda: bool(started(a)))
        taken = [[spec.job for spec in started(it)] for it in (a, b)]
        assert sorted(taken) == sorted([[first.id], [second.id]])

    tell(story, tmp_path, str(tmp_path / "common"), max_jobs=1)
