"""Checkpoints of `tinker` clients that go while somebody begins with them, learns from them or reads them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve.core.request import Request
from coserve.wire.messages import Fault, LoadTraining, OpenTraining
from serving import Play, World
from tinkering import Caller, sent
from training import Trainer, create, started


async def saved(caller: Caller, run: str, number: int, name: str, kind: str = "sampler_weights") -> str:
    """The path of weights that were just saved."""
    ask = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}[kind]
    made = await caller.result(await caller.post(ask, {"model_id": run, "seq_id": number, "path": name}))
    return str(made["path"])


async def delete(world: World, path: str, headers: dict[str, str] | None = None) -> int:
    """The status of a checkpoint's deletion."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    url = f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}"
    return (await world.http.delete(url, headers=headers)).status_code


def kept(world: World) -> list[Path]:
    """Folders of checkpoints that are there."""
    return [one for one in (world.state.store.folder / "tinker").iterdir() if not one.name.startswith(".")]


async def restart(world: World) -> None:
    """Kills the engine; returns when the next one has connected."""
    engines = world.state.link.connections
    await world.engine.die()
    await world.engine.start()
    await world.until(lambda: world.state.link.connections > engines)


def test_a_job_keeps_what_it_begins_with_and_learns_from(play: Play) -> None:
    """The checkpoints are deleted while the job waits, or before it starts again in another engine."""

    async def story(world: World) -> None:
        caller, trainer = Caller(world), Trainer(world)
        run = await caller.run()
        start, teacher = [await saved(caller, run, n, name) for n, name in ((1, "start"), (2, "teacher"))]
        taught = {"type": "distillation", "distillation": {"teacher": teacher}}
        first = await create(world)
        waits = await create(world, model=start, extra_body={"method": taught})
        assert waits.status == "queued"
        assert [await delete(world, path) for path in (start, teacher)] == [204, 204] and not kept(world)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await create(world, model=start)
        with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
            await create(world, extra_body={"method": taught})
        assert unknown.value.param == "method.distillation.teacher"
        await trainer.succeed(first.id)
        await world.until(lambda: len(started(world)) == 2)
        await trainer.start(waits.id)
        await restart(world)
        await world.until(lambda: len(started(world)) == 3)
        folders = set()
        for spec in started(world)[1:]:
            assert spec.job == waits.id and spec.start_from is not None and spec.teacher is not None
            folders |= {Path(spec.start_from), Path(spec.teacher)}
        files = ["adapter_config.json", "adapter_model.safetensors"]
        assert [sorted(file.name for file in folder.iterdir()) for folder in folders] == [files] * 2
        trainer.number = 0
        await trainer.succeed(waits.id)
        assert not any(folder.exists() for folder in folders)

    play(story, max_jobs=1)


def test_jobs_that_are_refused_or_cancelled_leave_no_files(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        start = await saved(caller, await caller.run(), 1, "start")
        world.engine.refusals["job"] = Fault("OutOfMemory", "400 MB are missing")
        with pytest.raises(openai.BadRequestError, match="400 MB"):
            await create(world, model=start)
        del world.engine.refusals["job"]
        await create(world)
        waits = await create(world, model=start)
        jobs = world.state.store.folder / "jobs"
        assert [one.parent.name for one in jobs.glob("*/start")] == [waits.id]
        await world.client().fine_tuning.jobs.cancel(waits.id)
        assert not list(jobs.glob("*/start"))

    play(story, max_jobs=1)


def test_a_run_keeps_the_state_that_it_has_loaded(play: Play) -> None:
    """Deleted between the load and the next engine, which begins with it."""

    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        state, later = [await saved(caller, run, n, f"state-{n}", "weights") for n in (1, 2)]
        body = {"session_id": await caller.session(), "model_seq_id": 0, "path": state, "optimizer": True}
        other = (await caller.result(await caller.post("load_weights", body)))["model_id"]
        load = {"model_id": run, "seq_id": 3, "path": state, "optimizer": True}
        assert "path" in await caller.result(await caller.post("load_weights", load))
        assert await delete(world, state) == 204
        gone = await caller.result(await caller.post("load_weights", {**load, "seq_id": 4}))
        assert gone["category"] == "user" and f"There is no checkpoint '{state}'" in gone["error"]
        before = len(sent(world, LoadTraining))
        assert before == 2
        await restart(world)
        await world.until(lambda: len(sent(world, LoadTraining)) == 4)
        folders = {one.session: Path(one.path) for one in sent(world, LoadTraining)[before:]}
        assert folders.keys() == {run, other}
        assert all((folder / "adapter_config.json").is_file() for folder in folders.values())
        load = {"model_id": run, "seq_id": 5, "path": later, "optimizer": True}
        assert "path" in await caller.result(await caller.post("load_weights", load))
        await world.until(lambda: not folders[run].exists() and folders[other].exists())
        step = {"model_id": run, "seq_id": 6, "adam_params": {}}
        assert "metrics" in await caller.result(await caller.post("optim_step", step))

    play(story)


def test_a_run_whose_state_cannot_be_loaded_is_not_there(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        state = await saved(caller, run, 1, "state", "weights")
        world.engine.refusals["LoadTraining"] = Fault("AdapterMismatch", "it is of another base")
        body = {"session_id": run.partition(":")[0], "model_seq_id": 1, "path": state, "optimizer": True}
        failed = await caller.result(await caller.post("load_weights", body))
        assert failed == {"error": "it is of another base", "category": "user"}
        await world.until(lambda: world.engine.sessions == {run})
        await world.until(lambda: not list((world.state.store.folder / "tinker").glob(".*")))

    play(story)


def test_deleting_waits_for_no_run_that_waits_for_memory(play: Play) -> None:
    """Such a run has the files already; another tenant's would else keep a published checkpoint for ever."""

    async def story(world: World) -> None:
        caller = Caller(world)
        state = await saved(caller, await caller.run(), 1, "state", "weights")
        world.engine.deaf_to = (OpenTraining,)
        body = {"session_id": await caller.session(), "model_seq_id": 0, "path": state, "optimizer": True}
        waiting = await caller.post("load_weights", body)
        spares = world.state.store.folder / "tinker"
        await world.until(lambda: list(spares.glob(".spare-*/taken-1")))
        assert await delete(world, state) == 204  # 400 where it waits for the run, which goes on
        world.engine.deaf_to = ()
        await restart(world)
        assert "model_id" in await caller.result(waiting)

    play(story, drain_seconds=20)


async def answering(world: World, path: str) -> "asyncio.Task[Any]":
    """An answer of the weights at a path that has begun, and has no token before the next engine."""
    world.engine.deaf_to, before = (Request,), len(world.submits())
    asked = world.client().completions.create(model=path, prompt=[5], max_tokens=9, seed=1)
    task = asyncio.create_task(asked)
    await world.until(lambda: len(world.submits()) > before)
    return task


def test_weights_that_are_replaced_stay_until_their_last_answer(play: Play) -> None:
    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        path = await saved(caller, run, 1, "state", "weights")
        (old,) = kept(world)
        answer = await answering(world, path)
        body = {"model_id": run, "seq_id": 2, "path": "state", "overwrite": True}
        assert (await caller.result(await caller.post("save_weights", body)))["path"] == path
        assert old.is_dir() and len(kept(world)) == 2
        world.engine.deaf_to = ()
        await restart(world)
        assert (await answer).usage.completion_tokens == 9
        assert world.submits()[-1].adapter == old.name
        await world.until(lambda: not old.exists() and old.name not in world.engine.adapters)
        await world.client().completions.create(model=path, prompt=[5], max_tokens=1)
        assert [world.submits()[-1].adapter] == [folder.name for folder in kept(world)]

    play(story)


def test_expired_weights_in_use_keep_no_others(play: Play) -> None:
    """Nor a session's temporary ones, which go with their last answer."""

    async def story(world: World) -> None:
        caller, dialect = Caller(world), world.app.state.tinker
        dialect.look_seconds = 0.02
        run = await caller.run()
        used, _ = [await saved(caller, run, n, str(n)) for n in (1, 2)]
        body = {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 0}
        await caller.result(await caller.post("save_weights_for_sampler", body))
        store = world.state.store.tinker_checkpoints
        (temporary,) = await store.temporary()
        answers = [await answering(world, path) for path in (used, temporary.tinker_path)]
        rows, _ = await store.page("local", time.time())
        for row in rows:
            await store.change(row.id, expires=int(time.time()) - 1)
        finish = f"sessions/{run.partition(':')[0]}/finish"
        assert (await caller.post(finish, {"reason": {"type": "success"}})).status_code == 204
        await world.until(lambda: {one.name for one in kept(world)} == {s.adapter for s in world.submits()})
        for path in (used, temporary.tinker_path):
            with pytest.raises(openai.NotFoundError):
                await world.client().completions.create(model=path, prompt=[5], max_tokens=1)
        answers[0].cancel()
        await world.until(lambda: [one.name for one in kept(world)] == [temporary.id])
        answers[1].cancel()
        await world.until(lambda: not kept(world))

    play(story)


def test_copies_and_deletions_at_once(play: Play) -> None:
    """A copy is whole, or there is nothing to copy."""

    async def story(world: World) -> None:
        caller = Caller(world)
        run = await caller.run()
        paths = [await saved(caller, run, n, str(n)) for n in range(1, 9)]
        copies = [caller.post("copy_weights", {"source_path": path}) for path in paths]
        deletions = [delete(world, path) for path in paths]
        ends = await asyncio.gather(*(one for pair in zip(copies, deletions, strict=True) for one in pair))
        assert ends[1::2] == [204] * 8
        assert {answer.status_code for answer in ends[::2]} <= {200, 404}
        whole = [answer for answer in ends[::2] if answer.status_code == 200]
        assert len(kept(world)) == len(whole)
        assert all(len(list(folder.iterdir())) == 2 for folder in kept(world))

    play(story)
