"""A quiet tenant beside a greedy one: its first token waits for little but its own prompt."""

import random
from dataclasses import dataclass, replace

import pytest
from msgspec import structs

from coserve.core.events import StepDone
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.newcomers import SLOWER
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor

DEPTH, PAGE = 12, 16
ROUNDING = 1e-9


@dataclass
class Mix:
    """One greedy tenant's streams and jobs, and how much room there is."""

    draw: random.Random
    streams: int
    jobs: int
    pages: int
    adapters: int
    slo: SLO

    @classmethod
    def of(cls, seed: int) -> "Mix":
        draw = random.Random(seed)
        bounds = draw.choice((SLO(), SLO(first_token=2.0, between_tokens=0.25), SLO(between_tokens=0.02)))
        streams, pages = draw.randrange(1, 65), draw.choice((160, 400, 2048))
        return cls(draw, streams, draw.randrange(9), pages, draw.randrange(1, 5), bounds)


class World:
    """The greedy tenant takes whatever it is given, for ever."""

    def __init__(self, mix: Mix, max_running: int = 64) -> None:
        config = SchedulerConfig(layers=DEPTH, max_positions=2048, max_running=max_running)
        self.mix, self.draw = mix, mix.draw
        self.it = Scheduler(BaseCache(config, PagePool(mix.pages, PAGE)), CostModel(), make_policy("hybrid"))
        for trains in (False, True) * 16:
            self.it.cost.misses.observe(1.0, trains)  # this machine does what is predicted
        self.executor = ScriptedExecutor(PAGE)
        self.greedy: list[Sequence] = []
        for job in range(mix.jobs):
            self.train(f"job-{job}")

    def train(self, job: str) -> None:
        lengths = (self.draw.randrange(16, 300), self.draw.randrange(16, 300))
        self.it.training.add(job, [MicroBatch(self.it.new_key(), job, f"{job}@0", lengths, DEPTH)])

    def submit(self, prompt: int, answer: int, slo: SLO, arrival: float, newcomer: bool) -> Sequence:
        tokens = tuple(self.draw.randrange(1000) for _ in range(prompt))
        adapter = f"a{self.draw.randrange(self.mix.adapters)}@1"
        request = Request("r", tokens, SamplingParams(max_tokens=answer), adapter, slo, arrival)
        return self.it.requests.submit(structs.replace(request, newcomer=newcomer), self.executor.now)

    def step(self) -> None:
        self.greedy = [one for one in self.greedy if not one.is_finished]
        while len(self.greedy) < self.mix.streams:
            prompt, answer = self.draw.randrange(1, 200), self.draw.randrange(1, 200)
            self.greedy.append(self.submit(prompt, answer, self.mix.slo, self.executor.now, newcomer=False))
        for event in self.executor.step(self.it):
            if isinstance(event, StepDone):
                self.train(event.job)


def alone(prompt: int, answer: int) -> float:
    """Seconds to the first token of such a request on an idle machine."""
    world = World(Mix(random.Random(0), 0, 0, 2048, 1, SLO()))
    asked = world.submit(prompt, answer, SLO(), 0.0, newcomer=True)
    while asked.first_token_at is None:
        world.executor.step(world.it)
    return asked.first_token_at


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 80))]
)
def test_a_first_token_takes_twice_its_time_alone_and_the_step_under_way(seed: int) -> None:
    world = World(Mix.of(seed))
    for _ in range(world.draw.randrange(10, 60)):
        world.step()
    for _ in range(4):
        prompt, answer = world.draw.randrange(1, 700), world.draw.randrange(1, 20)
        before = world.executor.now
        world.step()
        under_way = world.executor.now - before
        arrival = before + world.draw.random() * under_way
        asked = world.submit(prompt, answer, world.mix.slo, arrival, newcomer=True)
        while asked.first_token_at is None:
            world.step()
        assert asked.first_token_at - before <= under_way + SLOWER * alone(prompt, answer) + ROUNDING
        while not asked.is_finished:
            world.step()
        assert asked.preemptions == 0


def test_streams_that_are_held_back_go_on_in_turn() -> None:
    world = World(Mix(random.Random(5), 48, 2, 4096, 1, SLO()))
    for _ in range(40):
        world.step()
    for _ in range(60):  # a newcomer in every step
        world.submit(4, 1, SLO(), world.executor.now, newcomer=True)
        world.step()
    begun = [one for one in world.greedy if one.last_token_at is not None]
    waited = [world.executor.now - one.last_token_at for one in begun if one.last_token_at is not None]
    steps = [result.seconds for result in world.executor.results[-60:]]
    assert len(begun) >= 30 and max(waited) <= 16 * max(steps)


def test_places_are_made_for_newcomers_and_nobody_is_lost() -> None:
    world = World(Mix(random.Random(3), 12, 1, 200, 1, SLO()), max_running=8)
    for _ in range(30):
        world.step()
    asked = world.submit(60, 4, SLO(), world.executor.now, newcomer=True)
    world.step()
    assert asked.first_token_at is not None
    greedy = list(world.greedy)
    world.mix.streams = 0
    while any(not one.is_finished for one in (*greedy, asked)):
        world.step()
    assert all(len(one.output) == one.request.sampling.max_tokens for one in (*greedy, asked))


def test_training_beside_answers_is_short_while_newcomers_come() -> None:
    world = World(Mix(random.Random(1), 8, 4, 2048, 1, SLO(first_token=5.0, between_tokens=5.0)))
    for _ in range(40):
        world.step()
    usual = max(result.seconds for result in world.executor.results[-20:])
    world.submit(4, 1, SLO(), world.executor.now, newcomer=True)
    for _ in range(40):
        world.step()
    shorter = max(result.seconds for result in world.executor.results[-20:])
    quantum = world.it.config.quantum
    assert shorter < usual and shorter <= quantum + max(
        world.it.cost.first.predict(replace(plan, training=(), updates=()))
        for plan in world.executor.plans[-20:]
    )
