"""Work on one tenant's data, for which no other tenant waits: checks of jobs by the API and by the engine."""

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import pytest

from coserve import Engine, EngineConfig
from coserve.engine import job_files
from coserve.engine.reading import Reading
from coserve.jobs import datasets
from coserve.wire.messages import CheckJob, Reply
from desk import Desk, job, write_data
from models import letter_tokenizer, tiny
from serving import Play, World
from training import create, upload

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HOSTILE = 3  # tenants, each with a job whose beginning takes minutes to be read


def hostile_data(file: Path) -> Path:
    """Chats of which each takes a while: a rendered prefix for every answer."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 100
    file.write_text(f"{json.dumps({'messages': turns})}\n" * 300)
    return file


def test_an_engine_checks_jobs_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "Reading", partial(Reading, seconds=0.3))
    monkeypatch.setattr(datasets, "_LEAST", 2)
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    desk = Desk(engine=Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=512), tokenizer))
    bad = hostile_data(tmp_path / "bad.jsonl")
    desk.send(CheckJob(1, job(write_data(tmp_path / "warm.jsonl"), tmp_path)))  # traces the model once
    desk.until(lambda: desk.replies)
    desk.send(*[CheckJob(10 + n, job(bad, tmp_path, f"bad{n}")) for n in range(HOSTILE)])
    began = time.monotonic()
    desk.send(CheckJob(2, job(write_data(tmp_path / "good.jsonl"), tmp_path, "good")))
    desk.until(lambda: any(reply.ref == 2 for reply in desk.replies))
    waited = time.monotonic() - began
    answered = {reply.ref for reply in desk.replies}
    assert answered == {1, 2}, "the good one waited for others"
    assert Reply(2) in desk.replies and waited < 10
    desk.until(lambda: len(desk.replies) == HOSTILE + 2)


def test_a_tenant_has_one_job_checked_at_a_time(play: Play) -> None:
    async def story(world: World) -> None:
        keys: dict[str, str] = {}
        for name in ("attacker", "other"):
            _, keys[name] = await world.state.store.tenants.create_key(name)
        files = {name: await upload(world, key) for name, key in keys.items()}
        world.engine.deaf_to = (CheckJob,)

        def asked() -> int:
            return sum(isinstance(command, CheckJob) for command in world.engine.said)

        creating = [
            asyncio.create_task(create(world, keys["attacker"], training_file=files["attacker"]))
            for _ in range(7)
        ]
        await world.until(lambda: asked() == 1)
        creating.append(asyncio.create_task(create(world, keys["other"], training_file=files["other"])))
        await world.until(lambda: asked() == 2)
        await asyncio.sleep(0.3)
        assert asked() == 2
        world.engine.deaf_to = ()
        world.engine.disconnect()  # the next one answers
        jobs = await asyncio.gather(*creating)
        assert len({made.id for made in jobs}) == 8

    play(story)
