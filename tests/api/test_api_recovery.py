"""Jobs through the deaths of engines and servers."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from coserve.errors import StateError
from coserve.serve.compose import build_state
from coserve.serve.engine import news
from coserve.serve.store.records import JobRecord
from coserve.wire.messages import JobCheckpoint, JobEnded, JobSpec, JobStep, Numbered, StopJob
from fake_engine import FakeEngine
from serving import SECONDS, Play, World, world
from training import Trainer, checkpoint_folder, create, started, stopped, upload, weighed
from waiting import until


async def status_of(world: World, id: str) -> str:
    return (await world.client().fine_tuning.jobs.retrieve(id)).status


async def new_engine(world: World, jobs: tuple[str, ...] = ()) -> None:
    """The engine dies, and another answers."""
    await world.engine.die()
    world.engine.said.clear()
    world.engine.jobs = jobs
    connections = world.state.link.connections
    await world.engine.start()
    await world.until(lambda: world.state.link.connections > connections)
    await world.state.link.news.settled()


def test_a_new_engine_gets_the_running_jobs(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        ids = [(await create(world, training_file=file)).id for _ in range(4)]
        assert [await status_of(world, id) for id in ids] == ["running", "running", "queued", "queued"]
        trainer = Trainer(world)
        await trainer.start(ids[0])
        for step in (1, 2, 3):
            await trainer.step(ids[0], step)
        await world.client().fine_tuning.jobs.cancel(ids[3])
        await new_engine(world)
        await world.until(lambda: len(started(world)) == 2)
        assert [command.job for command in started(world)] == ids[:2] and not stopped(world)
        # It goes on from step 1, and counts its news from 1 again.
        trainer = Trainer(world)
        await trainer.start(ids[0], step=1)
        await trainer.step(ids[0], 2, loss=0.25)
        rows = await world.state.store.job_history.metrics(ids[0])
        assert [(row["step"], row["train_loss"]) for row in rows] == [(1, 0.5), (2, 0.25), (3, 0.5)]
        await trainer.end(ids[1], "failed")
        await world.until(lambda: len(started(world)) == 3)
        assert started(world)[2].job == ids[2] and await status_of(world, ids[2]) == "running"

    play(story, max_jobs=2)


def test_an_engine_is_told_what_it_should_not_train(play: Play) -> None:
    async def story(world: World) -> None:
        paused, cancelled, runs, resumed = [(await create(world)).id for _ in range(4)]
        await world.engine.die()  # so that nothing of this reaches it
        await world.until(lambda: not world.state.link.ready)
        jobs = world.client().fine_tuning.jobs
        await jobs.pause(paused)
        await jobs.cancel(cancelled)
        await jobs.pause(resumed)
        await jobs.resume(resumed)
        await new_engine(world, jobs=(paused, cancelled, runs, resumed, "ftjob-foreign"))
        await world.until(lambda: len(stopped(world)) == 3)
        assert {(c.job, c.keep) for c in stopped(world)} == {
            (paused, True), (cancelled, False), ("ftjob-foreign", False),
        }  # fmt: skip
        assert not started(world) and await status_of(world, resumed) == "running"

    play(story)


def test_a_restarted_server_takes_in_what_happened_meanwhile(tmp_path: Path) -> None:
    async def whole() -> None:
        async with world(tmp_path, {}, {"max_jobs": 1}) as first:
            trainer, settings = Trainer(first), first.state.settings
            job, waits = await create(first), await create(first)
            await first.until(lambda: bool(started(first)))
            path = checkpoint_folder(trainer.folder(job.id), 2)
            await trainer.start(job.id, steps=2)
            await trainer.step(job.id, 1)
        # The same engine, to which all of this happened while there was no server.
        engine = FakeEngine(tmp_path / "engine.sock")
        async with engine, asyncio.timeout(SECONDS):
            assert engine.hello().generation == first.engine.hello().generation
            engine.news = [
                Numbered(2, JobStep(job.id, 1, 0.5, 40, 60, 1.0, 2e-4, 2.0)),  # acknowledged, in vain
                Numbered(3, JobStep(job.id, 2, 0.25, 40, 60, 1.0, 2e-4, 2.0)),
                Numbered(4, JobCheckpoint(job.id, 2, str(path), "digest")),
                Numbered(5, JobEnded(job.id, "succeeded", 2)),
            ]
            async with build_state(settings, engine.socket) as state:
                await until(lambda: not engine.news)
                done = await state.store.jobs.get("local", job.id)
                assert done is not None and (done.status, done.trained_tokens) == ("succeeded", 120)
                assert len(await state.store.job_history.metrics(job.id)) == 2
                assert await state.store.adapters.find("local", done.name, "tiny") is not None
                await until(lambda: any(isinstance(c, JobSpec) and c.job == waits.id for c in engine.said))

    asyncio.run(whole())


def test_an_old_stop_that_is_told_again_frees_no_place(tmp_path: Path) -> None:
    async def whole() -> None:
        async with world(tmp_path, {}, {"max_jobs": 1}) as first:
            trainer, jobs, settings = Trainer(first), first.client().fine_tuning.jobs, first.state.settings
            job, waits = await create(first), await create(first)
            await first.until(lambda: bool(started(first)))
            await jobs.pause(job.id)
            await jobs.resume(job.id)
            await trainer.end(job.id, "paused", 0)
            assert [await status_of(first, id) for id in (job.id, waits.id)] == ["running", "queued"]
        engine = FakeEngine(tmp_path / "engine.sock")
        async with engine, asyncio.timeout(SECONDS):
            engine.jobs, engine.news = (job.id,), [Numbered(1, JobEnded(job.id, "paused", 0))]
            async with build_state(settings, engine.socket) as state:
                await until(lambda: not engine.news)
                assert not any(isinstance(command, JobSpec) for command in engine.said)
                still = await state.store.jobs.get("local", job.id)
                assert still is not None and still.status == "running"

    asyncio.run(whole())


def test_a_finish_that_was_half_written_is_finished(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, store = Trainer(world), world.state.store
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id, steps=1)
        await trainer.step(job.id, 1)
        path = await trainer.checkpoint(job.id, 1)
        harvested = await world.state.job_controller._artifacts.bring_in(await known(world, job.id), 1)
        (path / "adapter_model.safetensors").unlink()  # it is in `adapters` already
        await trainer.end(job.id, "succeeded", 1)
        assert await status_of(world, job.id) == "succeeded"
        found = await store.adapters.get(harvested[0].id)
        assert found is not None and len(list(store.folder.joinpath("adapters").iterdir())) == 1

    play(story)


def test_a_damaged_last_checkpoint_fails_the_job(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id, steps=2)
        await trainer.checkpoint(job.id, 1)
        path = await trainer.checkpoint(job.id, 2)
        (path / "adapter_model.safetensors").write_bytes(b"rust")
        await trainer.end(job.id, "succeeded", 2)
        failed = await world.client().fine_tuning.jobs.retrieve(job.id)
        assert failed.status == "failed" and failed.error is not None
        assert "damaged" in failed.error.message
        (_, first) = (await world.client().fine_tuning.jobs.checkpoints.list(job.id)).data
        await world.client().completions.create(model=first.fine_tuned_model_checkpoint, prompt="x")
        assert not list(world.state.store.folder.joinpath("adapters").iterdir())

    play(story)


def test_resume_state_goes_when_it_is_superseded(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        paths = [await trainer.checkpoint(job.id, step) for step in (1, 2, 3)]

        def resumable() -> list[bool]:
            return [(path / "training.safetensors").exists() for path in paths]

        assert resumable() == [False, True, True]
        await trainer.end(job.id, "succeeded", 3)
        assert resumable() == [False, False, False]
        assert all((path / "adapter_model.safetensors").exists() for path in paths)

    play(story)


def test_jobs_share_the_machine_by_tenants(play: Play) -> None:
    async def story(world: World) -> None:
        _, ann = await world.state.store.tenants.create_key("ann")
        _, bob = await world.state.store.tenants.create_key("bob", weight=3.0)
        first = (await create(world, ann)).id
        flood = [(await create(world, ann)).id for _ in range(5)]
        small = (await create(world, bob)).id
        await world.until(lambda: len(started(world)) == 3)
        await Trainer(world).end(flood[0], "failed")
        await world.until(lambda: len(started(world)) == 4 and weighed(world).get(small) == 3.0)
        assert started(world)[3].job == small  # though four of ann's came before
        assert weighed(world)[first] == weighed(world)[flood[1]] == 0.5

    play(story, max_jobs=3)


def test_giant_jobs_of_one_tenant_make_room_for_anothers(play: Play) -> None:
    async def story(world: World) -> None:
        (_, ann), (_, bob) = [await world.state.store.tenants.create_key(name) for name in ("ann", "bob")]
        giants = [(await create(world, ann)).id for _ in range(3)]
        small = (await create(world, bob)).id
        await world.until(lambda: bool(stopped(world)))
        again = (await create(world, bob)).id  # one change of places at a time
        assert stopped(world) == [StopJob(giants[1], keep=True)]
        trainer = Trainer(world)
        await trainer.end(giants[1], "paused", 4)
        await world.until(lambda: len(started(world)) == 3)
        assert started(world)[2].job == small and len(stopped(world)) == 1
        await trainer.end(small, "failed")
        await world.until(lambda: len(started(world)) == 4)
        assert started(world)[3].job == again
        await trainer.end(again, "failed")
        await world.until(lambda: len(started(world)) == 5)
        assert started(world)[4].job == giants[1] and len(stopped(world)) == 1  # the oldest goes on
        await create(world, bob)
        await world.until(lambda: len(stopped(world)) == 2)

    play(story, max_jobs=2)


def test_nothing_starts_while_the_server_drains(play: Play) -> None:
    async def story(world: World) -> None:
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        world.state.job_controller.drain()
        await Trainer(world).end(job.id, "paused", 0)
        assert await status_of(world, job.id) == "queued" and len(started(world)) == 1

    play(story)


def test_half_made_files_are_swept_when_a_server_starts(tmp_path: Path, play: Play) -> None:
    state = tmp_path / "state"
    for half in ("files/.file-x", "adapters/.adapter-x/adapter_config.json"):
        (state / half).parent.mkdir(parents=True, exist_ok=True)
        (state / half).write_text("half")
    (state / "files" / "file-kept.jsonl").write_text("whole")

    async def story(world: World) -> None:
        assert [path.name for path in (state / "files").iterdir()] == ["file-kept.jsonl"]
        assert not list((state / "adapters").iterdir())

    play(story)


def test_a_full_disk_is_said_and_passes(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def story(world: World) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
                await upload(world)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        assert not list(world.state.settings.files.iterdir())
        assert await upload(world)

    play(story)


def test_the_next_job_starts_though_the_disk_was_full_for_a_moment(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first is written down, and bringing in the second fails: that is tried again."""
    monkeypatch.setattr(news, "WRITE_SECONDS", 0.01)

    async def story(world: World) -> None:
        file = await upload(world)
        first, second = [(await create(world, training_file=file)).id for _ in range(2)]
        move, moves = world.state.store.jobs.move, []

        async def failing_once(*arguments: Any) -> JobRecord | None:
            moves.append(arguments)
            if len(moves) == 1:
                raise StateError("the disk is full")
            return await move(*arguments)

        monkeypatch.setattr(world.state.store.jobs, "move", failing_once)
        await Trainer(world).end(first, "failed")
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].job == second and await status_of(world, second) == "running"

    play(story, max_jobs=1)


async def known(world: World, id: str) -> JobRecord:
    job = await world.state.store.jobs.get("local", id)
    assert job is not None
    return job
