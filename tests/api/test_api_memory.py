"""Memory as clients see it: jobs that never fit, jobs that wait, jobs that go on with less, figures."""

import asyncio
import time

import openai
import pytest

from coserve.serve.answering import replies
from coserve.serve.answering.answers import PieceStream
from coserve.serve.answering.call import Call
from coserve.serve.state import State
from coserve.wire.messages import (
    CheckJob,
    CheckMethod,
    Command,
    EngineStats,
    Fault,
    JobNote,
    JobSpec,
    JobStarved,
    JobWaiting,
)
from serving import Play, World
from training import Trainer, create, started, upload

REFUSED = "job ftjob-1 needs 3 GiB, 1 GiB more than a job can have of 4 GiB; it would fit with rank=4"
REASON = "waits for 1 GiB of memory, 300 MiB more than are free, until job a ends"


def test_a_job_that_never_fits_is_refused_when_it_is_created(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        world.engine.refusals["job"] = Fault("OutOfMemory", REFUSED)
        with pytest.raises(openai.BadRequestError) as refused:
            await create(world, training_file=file, extra_body={"peft": {"r": 64}})
        error = refused.value
        assert error.status_code == 400 and error.type == "invalid_request_error"
        assert error.code == "out_of_memory" and "rank=4" in str(error.message)
        asked = [command for command in world.engine.said if isinstance(command, CheckJob)]
        assert asked[0].spec.method == {"r": 64} and asked[0].spec.options["rows"] == 2048
        assert not started(world) and not (await world.client().fine_tuning.jobs.list()).data

    play(story)


def test_what_the_base_has_not_is_refused_when_a_job_is_created(play: Play) -> None:
    said = "no linear of the model is called ['wq']; there are ['k_proj', 'q_proj']"

    async def story(world: World) -> None:
        file = await upload(world)
        world.engine.refusals["job"] = Fault("AdapterMismatch", said)
        with pytest.raises(openai.BadRequestError) as refused:
            await create(world, training_file=file, extra_body={"peft": {"target_modules": ["wq"]}})
        assert refused.value.param == "peft" and said in str(refused.value.message)
        assert not started(world) and not (await world.client().fine_tuning.jobs.list()).data

    play(story)


def test_a_job_is_stored_when_an_engine_has_checked_it_and_not_before(play: Play) -> None:
    """An engine that dies of the check would die of the job, and so would the next one."""

    async def story(world: World) -> None:
        file = await upload(world)
        world.engine.deaf_to = (CheckJob,)
        creating = asyncio.create_task(create(world, training_file=file))
        for asked in (1, 2):
            await world.until(lambda: count(world) == asked)  # noqa: B023
            await world.engine.die()
            assert not await world.state.store.jobs.unfinished() and not creating.done()
            await world.engine.start()
        await world.until(lambda: count(world) == 3)
        assert not await world.state.store.jobs.unfinished()
        world.engine.deaf_to = ()
        world.engine.disconnect()
        assert (await creating).status in ("queued", "running") and count(world) == 4

    def count(world: World) -> int:
        return sum(isinstance(command, CheckJob) for command in world.engine.said)

    play(story)


@pytest.mark.parametrize("deaf_to", [CheckJob, CheckMethod])
def test_a_job_whose_check_does_not_end_is_refused(play: Play, deaf_to: type[Command]) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        world.engine.deaf_to = (deaf_to,)
        with pytest.raises(openai.InternalServerError) as refused:
            await create(world, training_file=file, extra_body={"peft": {"r": 4}})
        assert refused.value.status_code == 503 and "nothing was stored" in str(refused.value.message)
        assert not started(world) and not (await world.client().fine_tuning.jobs.list()).data

    play(story, engine_wait_seconds=0.2)


def test_rows_are_a_setting_of_the_optimizer_s(play: Play) -> None:
    async def story(world: World) -> None:
        await create(world, extra_body={"optimizer": {"rows": 512}})
        await world.until(lambda: bool(started(world)))
        assert started(world)[0].options["rows"] == 512

    play(story)


def test_a_job_that_waits_for_memory_is_queued_and_says_why(play: Play) -> None:
    async def story(world: World) -> None:
        client, trainer = world.client(), Trainer(world)
        job = await create(world)
        assert job.status == "running" and job.waiting_for is None
        await trainer.tell(JobWaiting(job.id, REASON))
        waiting = await client.fine_tuning.jobs.retrieve(job.id)
        assert (waiting.status, waiting.waiting_for) == ("queued", REASON)
        events = (await client.fine_tuning.jobs.list_events(job.id)).data
        assert events[0].message == f"Fine-tuning job {REASON}"
        assert len(started(world)) == 1, "it is in the engine already"
        await trainer.start(job.id)
        begun = await client.fine_tuning.jobs.retrieve(job.id)
        assert (begun.status, begun.waiting_for) == ("running", None)

    play(story)


def test_a_job_that_waits_still_waits_when_the_server_is_back(play: Play) -> None:
    """The engine says so in its first message; the news were taken down before."""

    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await trainer.tell(JobWaiting(job.id, REASON))
        world.engine.jobs, world.engine.waiting = (job.id,), {job.id: f"{REASON} again"}
        before = world.state.link.connections
        world.engine.disconnect()
        await world.until(lambda: world.state.link.connections > before)
        await world.state.link.news.settled()
        found = await world.client().fine_tuning.jobs.retrieve(job.id)
        assert (found.status, found.waiting_for) == ("queued", f"{REASON} again")

    play(story)


def test_a_running_job_without_time_to_train_says_so(play: Play) -> None:
    async def story(world: World) -> None:
        client, trainer = world.client(), Trainer(world)
        job = await create(world)
        await trainer.start(job.id)
        assert "coserve_finetune_jobs_starved 0.0" in (await world.http.get("/metrics")).text
        before = time.time()
        await trainer.tell(JobStarved(job.id, 12.0))
        found = await client.fine_tuning.jobs.retrieve(job.id)
        assert found.status == "running" and abs(found.waiting_since - (before - 12.0)) < 5.0
        for said in ("beside requests", "scheduler.starvation", "--slowdown", "flex"):
            assert said in found.waiting_for
        assert "coserve_finetune_jobs_starved 1.0" in (await world.http.get("/metrics")).text
        world.engine.jobs, world.engine.starved = (job.id,), (JobStarved(job.id, 100.0),)
        connections = world.state.link.connections
        world.engine.disconnect()  # and a server that comes back hears of it
        await world.until(lambda: world.state.link.connections > connections)
        await world.state.link.news.settled()
        found = await client.fine_tuning.jobs.retrieve(job.id)
        assert abs(found.waiting_since - (before - 100.0)) < 5.0
        await trainer.tell(JobStarved(job.id, None))
        found = await client.fine_tuning.jobs.retrieve(job.id)
        assert (found.status, found.waiting_for, found.waiting_since) == ("running", None, None)
        events = (await client.fine_tuning.jobs.list_events(job.id)).data
        assert [(event.level, "beside requests" in event.message) for event in events[:2]] == [
            ("info", False), ("warn", True)
        ]  # fmt: skip
        assert "for 12 s" in events[1].message
        await trainer.tell(JobStarved(job.id, 11.0))
        paused = await client.fine_tuning.jobs.pause(job.id)
        assert (paused.status, paused.waiting_for, paused.waiting_since) == ("paused", None, None)
        await trainer.end(job.id, "paused")
        assert "coserve_finetune_jobs_starved 0.0" in (await world.http.get("/metrics")).text

    play(story)


def test_a_job_that_waits_can_be_cancelled_and_paused(play: Play) -> None:
    async def story(world: World) -> None:
        client, trainer = world.client(), Trainer(world)
        jobs = [await create(world) for _ in range(2)]
        for job in jobs:
            await trainer.tell(JobWaiting(job.id, REASON))
        assert (await client.fine_tuning.jobs.cancel(jobs[0].id)).status == "cancelled"
        paused = await client.fine_tuning.jobs.pause(jobs[1].id)
        assert paused.status == "paused" and paused.waiting_for is None
        await trainer.end(jobs[0].id, "cancelled")
        await trainer.end(jobs[1].id, "paused")
        resumed = await client.fine_tuning.jobs.resume(jobs[1].id)
        assert resumed.status == "running"
        await world.until(lambda: len(started(world)) == 3)
        assert [command.job for command in started(world)] == [jobs[0].id, jobs[1].id, jobs[1].id]

    play(story)


def test_a_job_that_waits_for_a_place_says_so_too(play: Play) -> None:
    async def story(world: World) -> None:
        await create(world)
        second = await create(world)
        assert second.status == "queued" and "one of 1 jobs" in second.waiting_for

    play(story, max_jobs=1)


def test_a_job_that_goes_on_with_less_tells_so(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await trainer.start(job.id)
        await trainer.tell(JobNote(job.id, "job ran out of memory; it goes on with rows=1024, keep=inputs"))
        events = (await world.client().fine_tuning.jobs.list_events(job.id)).data
        assert events[0].level == "warn" and "rows=1024" in events[0].message
        assert (await world.client().fine_tuning.jobs.retrieve(job.id)).status == "running"

    play(story)


def test_a_job_that_fails_for_memory_says_what_would_fit(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await trainer.end(job.id, "failed", fault=Fault("OutOfMemory", REFUSED))
        failed = await world.client().fine_tuning.jobs.retrieve(job.id)
        assert failed.status == "failed" and failed.error.code == "out_of_memory"
        assert failed.error.message == REFUSED

    play(story)


def test_memory_is_among_the_figures(play: Play) -> None:
    async def story(world: World) -> None:
        world.state.link.stats = EngineStats(
            1, 0, 0, 0, 0.0, 0, 0, 0, 0, 8, 8, 0.1, 0, 0, 0,
            memory={"base": 1000, "activations": 250}, memory_budget=4096, memory_peak=1300,
            memory_imports=700,
        )  # fmt: skip
        text = (await world.http.get("/metrics")).text
        for line in (
            'coserve_memory_bytes{account="base"} 1000.0',
            'coserve_memory_bytes{account="activations"} 250.0',
            "coserve_memory_budget_bytes 4096.0",
            "coserve_memory_peak_bytes 1300.0",
            "coserve_memory_imports_bytes 700.0",
            'coserve_process_resident_bytes{process="api"} ',
        ):
            assert line in text

    play(story, engine={"hangs": True})  # it would say figures of its own


def test_every_start_of_a_job_was_checked_first(play: Play) -> None:
    async def story(world: World) -> None:
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        kinds = [type(c) for c in world.engine.said if isinstance(c, CheckJob | JobSpec)]
        assert kinds == [CheckJob, JobSpec] and started(world)[0].job == job.id

    play(story)


def test_an_answer_under_way_does_not_hold_the_text_of_its_call(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 8 MiB is tokens by then, and a tenant may have hundreds of streams."""
    seen, answer = list[Call](), replies.answer

    def watched(state: State, call: Call) -> PieceStream:
        seen.append(call)
        return answer(state, call)

    monkeypatch.setattr(replies, "answer", watched)

    async def story(world: World) -> None:
        text = "a rare word, " * 20
        chat = {"messages": [{"role": "user", "content": text}]}
        for path, asked in (("chat/completions", chat), ("completions", {"prompt": text})):
            sent = {"model": "tiny", "max_tokens": 3, "stream": True, **asked}
            assert "[DONE]" in (await world.http.post(f"/v1/{path}", json=sent)).text
        assert len(seen) == 2 and all(len(one.prompts[0]) > 20 for one in seen)
        assert not any(text[:12] in repr(one) for one in seen)

    play(story)
