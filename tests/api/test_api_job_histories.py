"""Drawn histories of jobs: always `waiting_for` is the reason that holds, and no event contradicts it."""

import asyncio
import os
import random
from itertools import pairwise
from typing import Any

import pytest

from coserve.core import job_words
from coserve.core.job_status import JobStatus
from coserve.wire.messages import JobSpec, JobStarved, JobWaiting, StopJob
from serving import Play, World
from training import Trainer, create, upload

REASON = "waits for memory: it needs 2.0 GiB"
MOST = 2  # jobs that train at once
MOVES = 40
SEEDS = int(os.environ.get("COSERVE_ATTACK_HISTORIES", "1"))


class Engine:
    """A reference of what an engine has, by what it was sent and what it said."""

    def __init__(self, world: World) -> None:
        self.world, self.trainer = world, Trainer(world)
        self.heard = 0
        self.has: dict[str, str] = {}  # reading, waiting, training or starved by, of each job that it has
        self.stopping: dict[str, bool] = {}  # jobs that it is to end: resumable, or for good
        self.again: set[str] = set()
        self.steps: dict[str, int] = {}

    def listen(self) -> None:
        said = self.world.engine.said
        for command in said[self.heard :]:
            if isinstance(command, JobSpec):
                assert command.job not in self.has
                self.has[command.job] = "reading"
            elif isinstance(command, StopJob):
                self.stopping[command.job] = command.keep
        self.heard = len(said)

    async def act(self, draws: random.Random) -> None:
        """Something that an engine may do now."""
        choices: list[tuple[str, str]] = [("end", job) for job in self.stopping]
        for job, state in self.has.items():
            if job not in self.stopping:
                after = {"reading": ("start", "wait"), "waiting": ("start",), "training": ("step", "starve")}
                choices += [(what, job) for what in after.get(state, ("feed",))]
        if not choices:
            return
        what, job = draws.choice(choices)
        if what == "start":
            await self.trainer.start(job, self.steps.get(job, 0), 50)
            self.has[job] = "training"
        elif what == "wait":
            await self.trainer.tell(JobWaiting(job, REASON))
            self.has[job] = "waiting"
        elif what == "step":
            self.steps[job] = self.steps.get(job, 0) + 1
            await self.trainer.step(job, self.steps[job])
        elif what == "starve":
            by: Any = draws.choice(["requests", "jobs"])
            await self.trainer.tell(JobStarved(job, 12.0, by))
            self.has[job] = by
        elif what == "feed":
            await self.trainer.tell(JobStarved(job, None))
            self.has[job] = "training"
        else:
            keep = self.stopping.pop(job)
            del self.has[job]
            await self.trainer.end(job, "paused" if keep else "cancelled", self.steps.get(job, 0))


def reasons(job: Any, engine: Engine) -> list[str]:
    """All reasons that hold, each by its own."""
    state = engine.has.get(job.id)
    is_ready = engine.world.state.link.ready
    waits, runs = job.status == "queued", job.status == "running"
    found = {
        "waits for the engine, which is starting": (waits or runs) and not is_ready,
        REASON: waits and state == "waiting",
        "waits until its earlier run has stopped": waits and state not in (None, "waiting"),
        "waits to be tried alone, as an engine ended while it trained": runs and state is None and is_ready,
        f"waits until one of {MOST} jobs that train ends": waits
        and state is None
        and len(engine.has) >= MOST,
        "begins in a moment": waits and state is None and len(engine.has) < MOST,
    }
    for by in ("requests", "jobs"):
        found[job_words.STARVED[by] + job_words.REMEDY[by]] = runs and state == by  # type: ignore[index]
    return [reason for reason, holds in found.items() if holds]


async def agreed(engine: Engine, jobs: Any, made: list[str]) -> set[str | None]:
    """The reasons for which jobs wait, once these hold: a command takes a moment to reach the engine."""
    for _ in range(200):
        engine.listen()
        found = [await jobs.retrieve(id) for id in made]
        hold = {one.id: reasons(one, engine) for one in found}
        if all(one.waiting_for == (hold[one.id] or [None])[0] for one in found):
            break
        await asyncio.sleep(0.01)
    for one in found:
        assert len(hold[one.id]) <= 1 or not engine.world.state.link.ready, "reasons exclude each other"
        assert one.waiting_for == (hold[one.id] or [None])[0], (one.id, one.status, hold[one.id], engine.has)
        starves = one.status == "running" and engine.has.get(one.id) in ("requests", "jobs")
        assert (one.waiting_since is not None) == starves
        assert one.slowdown is None or (one.status == "running" and engine.steps.get(one.id))
    return {one.waiting_for for one in found}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_job_waits_for_is_what_it_waits_for(play: Play, seed: int) -> None:
    async def story(world: World) -> None:
        draws, engine, told = random.Random(seed), Engine(world), set[str | None]()
        jobs = world.client().fine_tuning.jobs
        file = await upload(world)
        made: list[str] = []
        may_die = True
        for _ in range(MOVES):
            match draws.randrange(8):
                case 0 if len(made) < 6:
                    made.append((await create(world, training_file=file)).id)
                case 1 | 2 if made:
                    job = await jobs.retrieve(draws.choice(made))
                    if job.status == "paused":
                        await jobs.resume(job.id)
                    elif job.status in ("queued", "running"):
                        await (jobs.cancel if draws.random() < 0.2 else jobs.pause)(job.id)
                case 3 if may_die and draws.random() < 0.3:
                    may_die = False
                    await world.engine.die()
                    await world.until(lambda: not world.state.link.ready)
                    engine.has, engine.stopping, engine.heard = {}, {}, len(world.engine.said)
                    told |= await agreed(engine, jobs, made)
                    engine.trainer.number, connections = 0, world.state.link.connections
                    await world.engine.start()
                    await world.until(lambda: world.state.link.connections > connections)  # noqa: B023
                    await world.state.link.news.settled()
                case _:
                    await engine.act(draws)
            await world.state.link.news.settled()
            told |= await agreed(engine, jobs, made)
        assert len(told) > 2
        for id in made:
            events = [event.message async for event in jobs.list_events(id)][::-1]
            lifecycle = [
                event.removeprefix("Fine-tuning job ") for event in events if "Fine-tuning job " in event
            ]
            for before, after in pairwise(lifecycle):
                assert not (before.startswith(("paused", "cancelled")) and after.startswith("stopped")), (
                    lifecycle
                )

    play(story, max_jobs=MOST)


@pytest.mark.parametrize("status", list(JobStatus))
@pytest.mark.parametrize("step", [0, 7])
def test_leaving_an_engine_is_told_once_and_for_the_reason_that_there_is(
    status: JobStatus, step: int
) -> None:
    said = job_words.stopped(status, step, "as the server stops")
    if status == JobStatus.RUNNING:
        end = "saved at step 7" if step else "before its first step"
        assert said == f"Fine-tuning job stopped as the server stops, {end}"
    elif status == JobStatus.PAUSED:
        assert said == (
            "Fine-tuning job saved at step 7, where it continues once it is resumed" if step else None
        )
    elif status == JobStatus.QUEUED:
        assert said == ("Fine-tuning job saved at step 7, where it continues" if step else None)
