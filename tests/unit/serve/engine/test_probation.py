"""Whoever crashes engines is found, and nobody else is: a pure model of engines that come and go."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from coserve.serve.engine.probation import ALONE_SECONDS, Kind, Probation, WorkItem

SEEDS = 60


@dataclass
class Work:
    """Something that takes `length` steps, and crashes its engine as it takes step `fatal`."""

    item: WorkItem
    length: int
    fatal: int | None
    done: int = 0


class Crashed(Exception):
    """The engine is gone."""


class Model:
    """Engines that do a step of everything they have in an order of their own."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.probation = Probation(clock=lambda: 0.0)
        self.todo: dict[WorkItem, Work] = {}
        self.inside: list[Work] = []
        self.guilty: set[WorkItem] = set()
        self.crashes = 0
        self.kills = 0

    def make(self, number: int) -> Work:
        kind: Kind = self.draws.choice(
            ("request", "request", "request", "adapter", "check", "job", "session")
        )
        length = self.draws.randrange(1, 20)
        fatal = self.draws.randrange(length) if self.draws.random() < 0.15 else None
        return Work(WorkItem(kind, str(number)), length, fatal)

    async def run(self, count: int) -> None:
        coming = [self.make(number) for number in range(count)]
        self.culprits = {work.item for work in coming if work.fatal is not None}
        waiting: dict[WorkItem, asyncio.Task[None]] = {}
        while coming or self.todo:
            for _ in range(min(self.draws.randrange(3), len(coming))):
                work = coming.pop()
                self.todo[work.item] = work
            for item, work in self.todo.items():
                if work not in self.inside and item not in waiting:
                    waiting[item] = asyncio.create_task(self.enter(work))
            for _ in range(3):
                await asyncio.sleep(0)
            waiting = {item: task for item, task in waiting.items() if not task.done()}
            try:
                self.step()
            except Crashed:
                for task in waiting.values():
                    task.cancel()
                await asyncio.gather(*waiting.values(), return_exceptions=True)
                waiting = {}
                self.inside.clear()
                for item in self.probation.crashed():
                    self.guilty.add(item)
                    del self.todo[item]

    async def enter(self, work: Work) -> None:
        await self.probation.turn(work.item)
        self.probation.enter(work.item, work.done)
        self.inside.append(work)

    def step(self) -> None:
        if self.draws.random() < 0.02:  # somebody kills it
            self.kills += 1
            self.probation.forget_engine()
            self.inside.clear()
            return
        self.draws.shuffle(self.inside)
        for work in list(self.inside):
            if work.done == work.fatal:
                self.crashes += 1
                raise Crashed
            work.done += 1
            if work.done == work.length:
                self.probation.left(work.item)
                self.inside.remove(work)
                del self.todo[work.item]
            else:
                self.probation.moved(work.item, work.done)


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_the_guilty_are_found_and_nobody_else(first: int) -> None:
    crashes = found = 0
    for seed in range(first, first + 20):
        model = Model(seed)
        asyncio.run(model.run(40))
        assert model.guilty == model.culprits, seed
        assert model.crashes <= 4 * len(model.culprits), seed
        assert not model.probation.suspects or not model.todo
        crashes, found = crashes + model.crashes, found + len(model.guilty)
    assert found > 80 and crashes <= 3.2 * found
    print(f"{found} culprits of 800 things were found, in {crashes} crashes; nobody else was blamed")


def test_suspects_go_one_after_the_other_and_jobs_last() -> None:
    async def story() -> None:
        probation = Probation()
        things = [WorkItem("request", "a"), WorkItem("job", "j"), WorkItem("adapter", "b")]
        for item in things:
            probation.enter(item)
        assert probation.crashed() == []
        entered: list[WorkItem] = []

        async def enter(item: WorkItem) -> None:
            await probation.turn(item)
            probation.enter(item)
            entered.append(item)

        tasks = [asyncio.create_task(enter(item)) for item in things]
        await asyncio.sleep(0.01)
        assert entered == things[:1]
        await probation.turn(WorkItem("request", "new"))  # nobody suspects it: it waits for nothing
        probation.left(things[0])
        await asyncio.sleep(0.01)
        assert entered == [things[0], things[2]]
        probation.left(things[2])
        await asyncio.sleep(0.01)
        assert entered == [things[0], things[2], things[1]]
        await asyncio.gather(*tasks)

    asyncio.run(story())


def test_a_job_that_repeats_steps_is_cleared_by_new_ones_only() -> None:
    probation, job = Probation(), WorkItem("job", "j")
    probation.enter(job)
    probation.moved(job, 7)
    assert probation.crashed() == []
    probation.enter(job, 7)
    for step in (0, 5, 6, 7):
        probation.moved(job, step)
        assert job in probation.suspects
    probation.moved(job, 8)
    assert job not in probation.suspects


def test_who_was_not_alone_has_another_chance_alone() -> None:
    seconds = [0.0]
    probation, old, new = Probation(lambda: seconds[0]), WorkItem("job", "j"), WorkItem("request", "r")
    probation.enter(old)
    assert probation.crashed() == []
    assert probation.is_open(new)  # nothing is tried alone yet
    probation.enter(old)
    probation.enter(new)
    assert probation.crashed() == [] and {t: s.crashes for t, s in probation.suspects.items()} == {
        old: 2,
        new: 1,
    }
    assert (
        not probation.is_open(new)
        and not probation.is_open(WorkItem("check", "c"))
        and probation.is_open(old)
    )
    seconds[0] = ALONE_SECONDS + 1  # it does not come: others wait no longer
    assert probation.is_open(new) and probation.is_open(WorkItem("check", "c"))
    seconds[0] = 0.0
    probation.enter(old)
    assert probation.crashed() == [old]
    probation.enter(new)
    assert probation.crashed() == [new]


def test_who_is_never_alone_is_found_in_the_end() -> None:
    probation, old = Probation(), WorkItem("job", "j")
    for number in range(4):
        probation.enter(old)
        probation.enter(other := WorkItem("request", str(number)))
        assert probation.crashed() == []
        probation.left(other)
    probation.enter(old)
    probation.enter(WorkItem("request", "last"))
    assert probation.crashed() == [old]
