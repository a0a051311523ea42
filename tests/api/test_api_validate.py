"""`/v1/fine_tuning/validate`: what a job would be, against a scripted engine."""

from typing import Any

import pytest

from coserve.wire.messages import Fault, JobPreview, PreviewJob, TextPiece, TokenCounts
from serving import Play, World
from training import started, upload

PREVIEW = JobPreview(
    container="JSON lines",
    format="chats in messages",
    records=30,
    tokens=TokenCounts(600, 10, 90, {"p50": 20, "p90": 40, "p99": 80}, ((10, 49, 28), (50, 89, 2))),
    limit=64,
    over=2,
    longest_place="chats.jsonl, line 7",
    skipped=2,
    dropped=1,
    examples=27,
    ignored=("id",),
    first=(TextPiece("user: Hi", False), TextPiece("Hello", True)),
    steps=81,
    seconds=12.5,
    memory=1000,
    memory_room=4000,
)


async def validate(world: World, **fields: Any) -> Any:
    return await world.http.post("/v1/fine_tuning/validate", json={"model": "tiny", **fields})


def test_a_job_is_told_before_it_is_created(play: Play) -> None:
    async def story(world: World) -> None:
        world.engine.preview, file = PREVIEW, await upload(world)
        optimizer = {"max_length": 64, "too_long": "skip"}
        body = {"optimizer": optimizer, "hyperparameters": {"n_epochs": 3}, "peft": {"r": 4}}
        answer = await validate(world, training_file=file, validation_file=file, **body)
        assert answer.status_code == 200
        found = answer.json()
        assert found["object"] == "fine_tuning.validation" and found["valid"] and found["error"] is None
        assert (found["filename"], found["model"]) == ("chats.jsonl", "tiny")
        assert (found["container"], found["format"]) == ("JSON lines", "chats in messages")
        assert found["records"] == {"total": 30, "read": 30, "all_read": True}
        assert found["tokens"] == {
            "total": 600, "min": 10, "p50": 20, "p90": 40, "p99": 80, "max": 90,
            "histogram": [{"from": 10, "to": 49, "count": 28}, {"from": 50, "to": 89, "count": 2}],
        }  # fmt: skip
        assert found["examples"] == {"trained": 27, "truncated": 0, "skipped": 2, "dropped": 1}
        assert found["too_long"] == {
            "count": 2, "limit": 64, "setting": "skip", "longest": "chats.jsonl, line 7", "split_texts": 0,
            "pieces": 0,
        }  # fmt: skip
        assert found["ignored"] == ["id"] and found["first_rejected"] is None
        assert found["first_example"] == [
            {"text": "user: Hi", "trained": False},
            {"text": "Hello", "trained": True},
        ]
        assert (found["steps"], found["expected_seconds"]) == (81, 12.5)
        assert found["memory"] == {"needed": 1000, "available": 4000}
        assert found["method"]["supervised"]["hyperparameters"]["n_epochs"] == 3
        (asked,) = [command for command in world.engine.said if isinstance(command, PreviewJob)]
        assert asked.records == 30 and asked.spec.method == {"r": 4}
        assert (asked.spec.data_name, asked.spec.validation_name) == ("chats.jsonl", "chats.jsonl")
        assert asked.spec.options["too_long"] == "skip" and asked.spec.options["epochs"] == 3
        assert not started(world) and not (await world.client().fine_tuning.jobs.list()).data
        assert not list((world.state.store.folder / "jobs").iterdir())

    play(story)


@pytest.mark.parametrize(
    ("kind", "param", "code"),
    [
        ("DataError", "training_file", "invalid_training_file"),
        ("ValidationDataError", "validation_file", "invalid_validation_file"),
        ("AdapterMismatch", "peft", "invalid_value"),
        ("OutOfMemory", None, "out_of_memory"),
    ],
)
def test_why_a_job_would_be_refused_is_told_with_the_rest(
    play: Play, kind: str, param: str | None, code: str
) -> None:
    async def story(world: World) -> None:
        world.engine.preview = JobPreview(fault=Fault(kind, "chats.jsonl, line 3: no"), steps=4)
        answer = await validate(world, training_file=await upload(world))
        found = answer.json()
        assert answer.status_code == 200 and found["valid"] is False and found["steps"] == 4
        assert found["error"] == {"code": code, "message": "chats.jsonl, line 3: no", "param": param}

    play(story)


def test_bodies_are_refused_as_a_jobs_are(play: Play) -> None:
    async def story(world: World) -> None:
        file = await upload(world)
        for fields, status, said in (
            ({"training_file": "file-none"}, 404, "No such File"),
            ({"training_file": file, "model": "x"}, 404, "x"),
            ({"training_file": file, "sufix": "x"}, 400, "did you mean 'suffix'?"),
            ({"training_file": file, "optimizer": {"too_long": "cut"}}, 400, "optimizer.too_long"),
        ):
            answer = await validate(world, **fields)
            assert answer.status_code == status and said in answer.json()["error"]["message"]
        world.engine.refusals["preview"] = Fault("ConfigError", "what an engine does not expect")
        answer = await validate(world, training_file=file)
        assert answer.status_code == 400 and "does not expect" in answer.json()["error"]["message"]

    play(story)
