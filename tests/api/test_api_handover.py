"""Work whose server hangs goes on at another one; what the first one writes afterwards changes nothing."""

import asyncio
import re
from collections.abc import Set
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from test_api_batches import ended, jsonl, line, results, start
from test_api_replicas import tell

from coserve.errors import EngineLost
from coserve.serve.store import leases
from coserve.serve.store.leases import LeaseKey
from coserve.serve.tinker import handover
from coserve.wire.messages import LoadTraining, SessionCommand, StepOptimizer
from serving import SECONDS, World, world
from tinkering import Caller, passed, sent
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
        row = await b.state.store.adapters.find("local", done.fine_tuned_model or "", "tiny")
        # The second owner's or a later one's: what the first one has put before its end is never in the way.
        assert row is not None and re.search(r"\.[2-9]\d*$", row.path.name), row
        kept = [one.name for one in (a.state.store.folder / "files").iterdir()]
        of_batch = [name for name in kept if batch.id.removeprefix("batch_") in name]
        # The second owner, or a later one: a busy machine lets leases of two seconds end.
        assert of_batch and all(re.search(r"\.[2-9]\d*\.jsonl$", name) for name in of_batch), of_batch

    tell(story, tmp_path, str(tmp_path / "common"))


async def insist(caller: Caller, path: str, body: dict[str, Any] | bytes) -> Any:
    """A request's promise, as the client asks for it: again while the run is on its way."""
    while (reply := await caller.post(path, body)).status_code == 409:
        await asyncio.sleep(0.05)
    return reply


async def told(caller: Caller, future: str) -> Any:
    """A future's result, as the client polls for it."""
    while (reply := await caller.post("retrieve_future", {"request_id": future})).status_code == 408:
        await asyncio.sleep(0.05)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_run_whose_server_hangs_goes_on_at_another_one_with_all_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        run = await here.run()
        for number in (1, 2):
            await here.result(await here.post("forward_backward", passed(run, number)))
        await here.result(await here.post("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}}))
        saved = await here.result(
            await here.post("save_weights", {"model_id": run, "seq_id": 4, "path": "x"})
        )
        assert (await here.post("optim_step", {"model_id": run, "seq_id": 5, "x": 1})).status_code == 400
        hang = Hang(a, monkeypatch)
        late = await here.post("save_weights", {"model_id": run, "seq_id": 6, "path": "late"})
        await a.until(lambda: hang.waiting)  # it is promised, and not done
        assert late.status_code == 200

        asked = {"model_id": run, "seq_id": 7, "adam_params": {}}
        sessions, held = b.app.state.tinker.sessions, asyncio.Event()
        look_up = sessions.session

        async def look_up_late(*given: Any) -> Any:
            monkeypatch.setattr(sessions, "session", look_up)
            await held.wait()
            return await look_up(*given)

        monkeypatch.setattr(sessions, "session", look_up_late)
        early = asyncio.create_task(there.post("retrieve_future", {"request_id": f"{run}:6"}))
        await asyncio.sleep(0.05)  # until it has found that the run is not there
        assert (await insist(there, "optim_step", asked)).status_code == 200
        held.set()
        assert (await early).status_code == 200, "the run has come while it was looked for"
        assert "metrics" in await told(there, f"{run}:7") and "metrics" in await told(there, f"{run}:3")
        assert (await told(there, f"{run}:0"))["model_id"] == run
        assert (await told(there, f"{run}:4"))["path"] == saved["path"]
        done = (await told(there, f"{run}:6"))["path"]
        names = [type(one).__name__ for one in sent(b, SessionCommand)]
        steps = ["Forward", "Forward", "StepOptimizer"]
        assert names == ["OpenTraining", *steps, "SaveTraining", "StepOptimizer"], "4 was done before"
        assert b.state.store.leases.fence("tinker", run) == 2

        stale = await here.post("retrieve_future", {"request_id": f"{run}:7"})
        assert stale.status_code == 408, "it has not noticed yet that another server has promised this"
        assert (await here.post("unload_model", {"model_id": run})).status_code == 409
        hang.go_on()
        await a.until(lambda: not a.app.state.tinker.runs._open)
        assert (await here.post("get_info", {"model_id": run})).status_code == 409
        assert (
            await here.post("retrieve_future", {"request_id": late.json()["request_id"]})
        ).status_code == 408
        kept, count = await a.state.store.tinker_checkpoints.page("local", 0.0)
        assert (count, {row.tinker_path for row in kept}) == (2, {saved["path"], done})
        assert sorted(one.name for one in (b.state.store.folder / "tinker").iterdir() if one.name[0] != ".")
        ended = await there.result(await there.post("unload_model", {"model_id": run}))
        assert ended["type"] == "unload_model"
        assert await b.state.store.run_log.read(run) is None

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_run_comes_back_to_a_server_that_had_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of the first time do not count: all of it is done again."""

    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        run = await here.run()
        await here.result(await here.post("forward_backward", passed(run, 1)))
        a.engine.deaf_to = (StepOptimizer,)
        asked = {"model_id": run, "seq_id": 2, "adam_params": {}}
        assert (await here.post("optim_step", asked)).status_code == 200
        first = Hang(a, monkeypatch)
        assert (await insist(there, "optim_step", {**asked, "seq_id": 3})).status_code == 200
        assert "metrics" in await told(there, f"{run}:3")
        followed, noticed, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slowly(lost: Set[LeaseKey]) -> None:
            """Follows what was lost before runs do, for a long time."""
            if lost:
                noticed.set()
                await followed.wait()

        async def at_last(lost: Set[LeaseKey]) -> None:
            if lost:
                over.set()

        a.state.store.leases.on_renewed.insert(0, slowly)
        a.state.store.leases.on_renewed.append(at_last)
        first.go_on()
        await noticed.wait()
        a.engine.deaf_to = ()

        before = len(sent(a, SessionCommand))
        Hang(b, monkeypatch)
        assert (await insist(here, "optim_step", {**asked, "seq_id": 4})).status_code == 200
        followed.set()
        await over.wait()
        more = await insist(here, "optim_step", {**asked, "seq_id": 5})
        assert more.status_code == 200, "it has come back since, and stays"
        for number in (1, 2, 3, 4, 5):
            assert "error" not in await told(here, f"{run}:{number}")
        names = [type(one).__name__ for one in sent(a, SessionCommand)[before:]]
        steps = ["Forward", *["StepOptimizer"] * 4]
        assert [name for name in names if name != "CloseTraining"] == ["OpenTraining", *steps]

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_run_that_another_server_has_promised_is_not_lost_where_it_was_asked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is stopped before it has made a run; its client asks another one, and both for the result."""

    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        session, log, goes_on = await here.session(), a.state.store.run_log, asyncio.Event()
        claim, asked = a.state.store.leases.claim, asyncio.Event()

        async def late(*given: Any) -> Any:
            asked.set()
            await goes_on.wait()
            return await claim(*given)

        monkeypatch.setattr(a.state.store.leases, "claim", late)
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        early = asyncio.create_task(here.post("create_model", body))
        await asked.wait()
        promised = (await there.post("create_model", body)).json()["request_id"]
        assert (await here.post("retrieve_future", {"request_id": promised})).status_code == 408
        goes_on.set()
        assert (await early).status_code == 409
        run = (await told(there, promised))["model_id"]
        assert (await here.post("retrieve_future", {"request_id": promised})).status_code == 408
        assert await log.read(run) is not None

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_taking_over_ends_when_another_server_takes_the_run_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(a: World, b: World) -> None:
        here, there = Caller(a), Caller(b)
        run = await here.run()
        asked = {"model_id": run, "adam_params": {}}
        assert (await here.post("optim_step", {**asked, "seq_id": 1})).status_code == 200
        first, tinker, begun = Hang(a, monkeypatch), b.app.state.tinker, asyncio.Event()

        async def endlessly(*_: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(tinker.requests, "repeat", endlessly)
        while not begun.is_set():
            assert (await there.post("optim_step", {**asked, "seq_id": 2})).status_code == 409
            await asyncio.sleep(0.05)
        second = Hang(b, monkeypatch)
        first.go_on()
        assert (await insist(here, "optim_step", {**asked, "seq_id": 2})).status_code == 200
        assert tinker.runs.open_runs(run) and tinker.runs._taking, "it has not noticed yet"
        second.go_on()
        await b.until(lambda: not tinker.runs.open_runs(run) and not tinker.runs._taking)
        for number in (1, 2):
            assert "metrics" in await told(here, f"{run}:{number}")

    tell(story, tmp_path, str(tmp_path / "common"))


def test_a_run_goes_on_after_a_restart_from_the_state_that_is_kept_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server keeps a state after each second step, and forgets what is before once the client has it."""
    monkeypatch.setattr(handover, "STEPS", 2)

    def step(run: str, number: int) -> dict[str, Any]:
        return {"model_id": run, "seq_id": number, "adam_params": {}}

    async def first() -> tuple[str, str]:
        async with world(tmp_path, {}, {}) as it:
            caller, log = Caller(it), it.state.store.run_log
            run = await caller.run()
            for number in (1, 2):
                await caller.result(await caller.post("optim_step", step(run, number)))
            while (kept := await log.read(run)) is None or [one.number for one in kept.states] != [2]:
                await asyncio.sleep(0.01)
            await it.until(lambda: it.app.state.tinker.runs.open_runs(run)[0].backlog.newer is None)
            await caller.post("optim_step", step(run, 3))  # whose result nobody reads
            await it.until(lambda: len(sent(it, StepOptimizer)) == 3)
            await caller.result(await caller.post("optim_step", step(run, 4)))
            await it.until(lambda: it.app.state.tinker.runs.open_runs(run)[0].backlog.newer == 4)
            found = await log.read(run)
            assert found is not None
            assert [state.number for state in found.states] == [2, 4]
            assert [one.number for one in found.requests] == [3, 4], "as the client has no result of 3"
            it.engine.deaf_to = (StepOptimizer,)
            await caller.post("optim_step", step(run, 5))
            await it.until(lambda: len(sent(it, StepOptimizer)) == 5)
            it.state.draining = True  # the server ends, with one under way
            it.state.link.refuse(EngineLost("the server is being stopped"))
            await it.until(lambda: not it.app.state.tinker.runs.open_runs(run))
            assert await log.read(run) is not None
            return run, str(found.states[0].path)

    async def second(run: str, state: str) -> None:
        async with world(tmp_path, {}, {}) as it:
            caller = Caller(it)
            assert "metrics" in await told(caller, f"{run}:3")
            (load,) = sent(it, LoadTraining)
            assert load.optimizer and sorted(one.name for one in Path(load.path).iterdir()) == sorted(
                one.name for one in (it.state.store.folder / state).iterdir()
            )
            await told(caller, f"{run}:4")
            assert "metrics" in await told(caller, f"{run}:5")
            assert len(sent(it, StepOptimizer)) == 3
            assert (await insist(caller, "optim_step", step(run, 6))).status_code == 200
            await told(caller, f"{run}:6")
            gone = await caller.post("optim_step", step(run, 2))
            assert gone.status_code == 400 and "was used by an earlier request" in gone.text

    tmp_path.joinpath("state").mkdir()
    asyncio.run(asyncio.wait_for(second(*asyncio.run(first())), SECONDS))


def test_a_queued_job_goes_where_room_is(tmp_path: Path) -> None:
    async def story(a: World, b: World) -> None:
        first, second = await create(a), await create(a)
        await b.until(lambda: bool(started(b)))
        await a.until(lambda: bool(started(a)))
        taken = [[spec.job for spec in started(it)] for it in (a, b)]
        assert sorted(taken) == sorted([[first.id], [second.id]])

    tell(story, tmp_path, str(tmp_path / "common"), max_jobs=1)
