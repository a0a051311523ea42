"""Jobs that are watched, moved, saved early and made again, and where adapters come from, against a scripted
engine."""

import asyncio
import json
import re
from typing import Any

from coserve.wire.messages import Hello, JobPreview, PreviewJob, ShownExample, TextPiece
from serving import Play, World
from training import Trainer, create, started, stopped, upload

JOBS = "/v1/fine_tuning/jobs"


async def job_of(world: World, id: str) -> Any:
    return (await world.http.get(f"{JOBS}/{id}")).json()


def test_a_job_is_stopped_and_saved(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        refused = await world.http.post(f"{JOBS}/{job.id}/save")
        assert refused.status_code == 409 and "nothing to save" in refused.json()["error"]["message"]
        await trainer.start(job.id)
        await trainer.step(job.id, 1)
        asked = (await world.http.post(f"{JOBS}/{job.id}/save")).json()
        assert (asked["status"], asked["stopping"]) == ("paused", True)
        await world.http.post(f"{JOBS}/{job.id}/save")
        assert [(one.job, one.keep) for one in stopped(world)] == [(job.id, True)]  # told the engine once
        await trainer.checkpoint(job.id, 1)
        await trainer.end(job.id, "paused", 1)
        done = await job_of(world, job.id)
        assert (done["status"], done["stopping"], done["progress"]["step"]) == ("succeeded", False, 1)
        assert done["result_files"] and done["fine_tuned_model"]
        world.say("yes")
        client = world.client()
        assert (await client.completions.create(model=done["fine_tuned_model"], prompt="x")).choices
        again = await world.http.post(f"{JOBS}/{job.id}/save")
        assert again.status_code == 409 and "succeeded" in again.json()["error"]["message"]

    play(story)


def test_a_paused_job_is_saved_with_its_best_checkpoint_and_resuming_takes_the_wish_back(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, file = Trainer(world), await upload(world)
        optimizer = {"load_best_model_at_end": True}
        more: Any = {"validation_file": file, "extra_body": {"optimizer": optimizer}}
        job = await create(world, training_file=file, **more)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id)
        for step in (1, 2):
            await trainer.step(job.id, step)
            await trainer.checkpoint(job.id, step)
        # Two checkpoints as good as each other: the first. So the newest is not simply taken.
        assert (await world.http.post(f"{JOBS}/{job.id}/save")).json()["stopping"]
        assert not (await world.http.post(f"{JOBS}/{job.id}/resume")).json()["stopping"]
        await trainer.end(job.id, "paused", 2)
        assert (await job_of(world, job.id))["status"] == "running"
        await world.http.post(f"{JOBS}/{job.id}/pause")
        await trainer.end(job.id, "paused", 2)
        done = (await world.http.post(f"{JOBS}/{job.id}/save")).json()
        assert (done["status"], done["progress"]["step"]) == ("succeeded", 1)

    play(story)


def test_a_job_is_saved_though_its_engine_died(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id)
        await trainer.step(job.id, 1)
        await trainer.checkpoint(job.id, 1)
        await trainer.step(job.id, 2)
        await world.http.post(f"{JOBS}/{job.id}/save")
        hello = world.state.link.hello
        assert isinstance(hello, Hello) and job.id not in hello.jobs
        await world.state.job_controller._connected(hello)
        done = await job_of(world, job.id)
        assert (done["status"], done["progress"]["step"]) == ("succeeded", 1)

    play(story)


def test_queued_jobs_are_moved(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, file = Trainer(world), await upload(world)
        ids = [(await create(world, training_file=file)).id for _ in range(4)]
        await world.until(lambda: bool(started(world)))

        async def queue() -> list[str]:
            return [one["id"] for one in (await world.http.get("/v1/fine_tuning/queue")).json()["data"]]

        async def move(job: str, before: str | None) -> Any:
            return await world.http.post(f"{JOBS}/{job}/move", json={"before": before})

        first, a, b, c = ids
        assert await queue() == [a, b, c]
        moved = await move(c, a)
        assert [one["id"] for one in moved.json()["data"]] == [c, a, b] == await queue()
        await move(c, None)
        assert await queue() == [a, b, c]
        await move(b, a)
        assert await queue() == [b, a, c]
        for job, before, status in (
            (first, a, 409),
            (a, first, 409),
            (a, "ftjob-none", 404),
            ("no", None, 404),
        ):
            assert (await move(job, before)).status_code == status
        assert await queue() == [b, a, c]
        await trainer.end(first, "cancelled")
        await world.until(lambda: len(started(world)) == 2)
        assert started(world)[1].job == b

    play(story, max_jobs=1)


def test_the_figures_of_a_job(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id, steps=12)
        for step in range(1, 12):
            await trainer.step(job.id, step, loss=1.0 / step)

        async def steps(**query: int) -> list[int]:
            found = (await world.http.get(f"{JOBS}/{job.id}/metrics", params=query)).json()["data"]
            assert all(one["train_loss"] == 1.0 / one["step"] for one in found)
            return [one["step"] for one in found]

        assert await steps() == list(range(1, 12))
        assert await steps(after_step=9) == [10, 11] and await steps(after_step=11) == []
        assert await steps(limit=3) == [1, 6, 11] and await steps(limit=4) == [1, 5, 9, 11]
        progress = (await job_of(world, job.id))["progress"]
        assert progress == {"step": 11, "total_steps": 12, "seconds_per_step": 2.0, "seconds_left": 2.0}

    play(story)


def test_a_job_is_watched_to_its_end(play: Play) -> None:
    async def story(world: World) -> None:
        trainer = Trainer(world)
        job = await create(world)
        await world.until(lambda: bool(started(world)))
        await trainer.start(job.id, steps=2)
        await trainer.step(job.id, 1)

        async def watch() -> list[Any]:
            text = (await world.http.get(f"{JOBS}/{job.id}/live")).text  # the whole stream
            return [event.removeprefix("data: ") for event in text.strip().split("\n\n")]

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.1)
        await trainer.step(job.id, 2)
        await trainer.checkpoint(job.id, 2)
        await trainer.end(job.id, "succeeded", 2)
        *told, done = await watching
        assert done == "[DONE]"
        events = [json.loads(one) for one in told]
        assert events[0]["job"]["status"] == "running" and events[0]["checkpoints"] == []
        assert events[-1]["job"]["status"] == "succeeded"
        assert [one["step_number"] for one in events[-1]["checkpoints"]] == [2]
        assert [one["step"] for event in events for one in event["metrics"]] == [1, 2]
        assert (await world.http.get(f"{JOBS}/other/live")).status_code == 404

    play(story)


def test_the_settled_configuration_makes_the_same_job(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "x", "reference": "x"}
        bodies: list[dict[str, Any]] = [
            {},
            {"suffix": "s", "metadata": {"a": "b"}, "peft": {"r": 4}, "method": {"type": "supervised"}},
            {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "save_steps": 7, "max_grad_norm": None}},
            {
                "validation_file": file,
                "optimizer": {"early_stopping_patience": 2, "lr_scheduler_type": "cosine"},
            },
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2}}}},
            {"method": {"type": "reinforcement", "reinforcement": {
                "grader": grader,
                "hyperparameters": {"compute_multiplier": 2, "eval_interval": 5, "clip": None},
            }}},
        ]  # fmt: skip
        for body in bodies:
            made = await world.http.post(JOBS, json={"model": "tiny", "training_file": file, **body})
            assert made.status_code == 200, made.text
            told = await world.http.get(f"{JOBS}/{made.json()['id']}/configuration")
            assert told.status_code == 200, told.text
            intervals = {"save_steps", "eval_interval"} & set(re.findall(r"\w+", told.text))
            assert len(intervals) == 1, told.text  # also where the server's default was taken
            cloned = await world.http.post(JOBS, json=told.json())
            assert cloned.status_code == 200, cloned.text
            rows = [(await world.state.store.jobs.get(one["organization_id"], one["id"])) for one in
                    (made.json(), cloned.json())]  # fmt: skip
            first, second = rows
            assert first is not None and second is not None
            for name in ("options", "peft", "every", "seed", "suffix", "labels", "model", "validation_file"):
                assert getattr(first, name) == getattr(second, name), (body, name)

    play(story, max_jobs=1)


def test_a_preview_token_by_token(play: Play) -> None:
    async def story(world: World) -> None:
        pieces = (TextPiece("Hi", False), TextPiece("you", True))
        world.engine.preview = JobPreview(
            shown=(ShownExample(pieces, 700), ShownExample(pieces[:1], 1, True))
        )
        file = await upload(world)
        body = {"model": "tiny", "training_file": file}
        told = (await world.http.post("/v1/fine_tuning/validate", json=body, params={"show": 2})).json()
        assert told["shown"] == [
            {
                "tokens": [{"text": "Hi", "trained": False}, {"text": "you", "trained": True}],
                "total_tokens": 700,
                "rejected": False,
            },
            {"tokens": [{"text": "Hi", "trained": False}], "total_tokens": 1, "rejected": True},
        ]
        (asked,) = [command for command in world.engine.said if isinstance(command, PreviewJob)]
        assert asked.shown == 2
        many = await world.http.post("/v1/fine_tuning/validate", json=body, params={"show": 17})
        assert many.status_code == 400

    play(story)


def test_adapters_and_where_they_come_from(play: Play) -> None:
    async def story(world: World) -> None:
        trainer, file = Trainer(world), await upload(world)
        first = await create(world, training_file=file, suffix="first")
        await world.until(lambda: bool(started(world)))
        await trainer.succeed(first.id)
        name = (await job_of(world, first.id))["fine_tuned_model"]
        second = await create(world, training_file=file, validation_file=file, model=name)
        (card,) = (await world.http.get("/v1/adapters")).json()["data"]
        assert (card["id"], card["job"], card["jobs"]) == (name, first.id, [second.id])
        assert card["bytes"] > 0 and card["requests"] == 0 and card["step"] is None
        await world.until(lambda: len(started(world)) == 2)
        await trainer.succeed(second.id)
        last = (await job_of(world, second.id))["fine_tuned_model"]

        async def page(**query: Any) -> Any:
            return (await world.http.get("/v1/adapters", params=query)).json()

        assert [one["id"] for one in (await page())["data"]] == [last, name]
        one = await page(limit=1)
        assert [each["id"] for each in one["data"]] == [last] and one["has_more"]
        rest = await page(limit=1, after=last)
        assert [each["id"] for each in rest["data"]] == [name] and not rest["has_more"]
        assert (await world.http.get("/v1/adapters", params={"after": "none"})).status_code == 400
        found = (await world.http.get(f"/v1/adapters/{last}/lineage")).json()["data"]
        kinds = [
            "adapter",
            "job",
            "training_file",
            "validation_file",
            "adapter",
            "job",
            "training_file",
            "base",
        ]
        assert [one["kind"] for one in found] == kinds and all(one["exists"] for one in found)
        assert [found[at]["name"] for at in (0, 2, 4, 7)] == [last, "chats.jsonl", name, "tiny"]
        assert found[1]["method"] == "supervised" and found[1]["steps"] == 3 and found[2]["examples"] == 30
        await world.http.delete(f"/v1/models/{name}")
        await world.http.delete(f"/v1/files/{file}")
        found = (await world.http.get(f"/v1/adapters/{last}/lineage")).json()["data"]
        assert [(one["kind"], one["exists"]) for one in found] == [
            ("adapter", True), ("job", True), ("training_file", False), ("validation_file", False),
            ("adapter", False), ("base", True),
        ]  # fmt: skip
        assert (await world.http.get("/v1/adapters/none/lineage")).status_code == 404

    play(story)


def test_another_tenants_job_is_neither_moved_nor_watched_nor_saved(play: Play) -> None:
    async def story(world: World) -> None:
        keys = {}
        for tenant in ("ann", "bob"):
            _, keys[tenant] = await world.state.store.tenants.create_key(tenant)
        job = await create(world, keys["ann"])
        headers = {"authorization": f"Bearer {keys['bob']}"}
        for method, path in (
            ("GET", "live"), ("GET", "metrics"), ("GET", "configuration"), ("POST", "save"), ("POST", "move"),
        ):  # fmt: skip
            body = {"before": None} if path == "move" else None
            found = await world.http.request(method, f"{JOBS}/{job.id}/{path}", headers=headers, json=body)
            assert found.status_code == 404, path
        for path in ("/v1/fine_tuning/queue", "/v1/adapters"):
            assert (await world.http.get(path, headers=headers)).json()["data"] == []

    play(story)
