"""Prompts that wait while tokens are due: the two bounds share what cannot be had, and training goes on."""

import pytest

from coserve.core.plan import BasePlan
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor

DEPTH = 8
ROW = 1e-4  # seconds that a prompt row adds to a step, in the cost model as it is before any measurement


class World:
    """A machine that behaves exactly as predicted, with answers under way and a line of prompts."""

    def __init__(self, between: float, training: bool = False) -> None:
        self.config = SchedulerConfig(layers=DEPTH, max_positions=4096)
        self.it = Scheduler(BaseCache(self.config, PagePool(4096, 16)), CostModel(), make_policy("hybrid"))
        for trains in (False, True) * 16:
            self.it.cost.misses.observe(1.0, trains)
        self.executor = ScriptedExecutor(16)
        self.between = between
        self.answers = [self.submit(8, 2000) for _ in range(4)]
        while any(answer.first_token_at is None for answer in self.answers):
            self.step()
        if training:
            batches = [MicroBatch(self.it.new_key(), "job", "job@0", (4096,), DEPTH) for _ in range(8)]
            self.it.training.add("job", batches)

    def submit(self, prompt: int, answer: int, first_token: float | None = None) -> Sequence:
        slo = SLO(first_token=first_token, between_tokens=self.between)
        sampling = SamplingParams(max_tokens=answer)
        request = Request("r", tuple(range(prompt)), sampling, slo=slo, arrival=self.executor.now)
        return self.it.requests.submit(request, self.executor.now)

    def step(self) -> BasePlan:
        self.executor.step(self.it)
        return self.executor.plans[-1]

    def worst_gap(self) -> float:
        """The longest time between two tokens of the answers, relative to the bound."""
        return max(answer.slowest for answer in self.answers) / self.between


def drain(world: World, prompts: list[Sequence]) -> list[float]:
    """Steps until all prompts have their first token; how late each was, relative to its bound."""
    begun = world.executor.now
    while any(prompt.first_token_at is None for prompt in prompts):
        world.step()
        assert world.executor.now < begun + 60.0, "the prompts never come to their turn"
    late = []
    for prompt in prompts:
        assert prompt.first_token_at is not None
        bound = prompt.request.slo.first_token or world.config.patience
        late.append((prompt.first_token_at - prompt.request.arrival) / bound)
    return late


def test_prompts_that_can_wait_leave_every_token_its_bound() -> None:
    world = World(between=0.016)
    late = drain(world, [world.submit(400, 1, first_token=3.0) for _ in range(6)])
    assert max(late) <= 1.0
    assert world.worst_gap() <= 1.0 + 1e-9


def test_prompts_that_cannot_wait_share_what_is_missing_with_the_tokens() -> None:
    """At the pace that the bound between tokens permits, these prompts would be five times too late."""
    world = World(between=0.014)
    prompts = [world.submit(400, 1, first_token=0.4) for _ in range(8)]
    step = world.it.cost.first.predict(world.step())
    assert step > 1.5 * world.between
    late = drain(world, prompts)
    assert 1.0 < world.worst_gap() < 2.5
    assert max(late) <= 1.15 * world.worst_gap()


def test_a_hopeless_prompt_costs_the_others_no_more_than_the_largest_step() -> None:
    world = World(between=0.012)
    drain(world, [world.submit(2000, 1, first_token=0.001) for _ in range(4)])
    longest = max(result.seconds for result in world.executor.results)
    assert (
        longest <= world.it.cost.first.predict(BasePlan()) + 0.013 + world.config.max_prefill_rows * 1.5 * ROW
    )
    assert max(sum(s.length for s in p.inference) for p in world.executor.plans) <= 512 + len(world.answers)


def test_who_states_no_bound_on_the_first_token_has_the_patience_of_the_line() -> None:
    world = World(between=0.0125)
    late = drain(world, [world.submit(1000, 1) for _ in range(20)])
    assert max(late) < 1.4
    assert world.worst_gap() < 1.4


@pytest.mark.parametrize("rate", [4, 8])
def test_a_backlog_drains_and_training_goes_on_after_it(rate: int) -> None:
    """A burst, then `rate` prompts a second: the line comes to an end, and the rest is for training."""
    world = World(between=0.03, training=True)
    burst = [world.submit(500, 20, first_token=1.0) for _ in range(16)]
    drain(world, burst)
    emptied, next_at = world.executor.now, world.executor.now
    before, waited = world.it.stats.backward_rows + world.it.stats.kept_rows, 0
    while world.executor.now < emptied + 10.0:
        if world.executor.now >= next_at:
            world.submit(200, 20, first_token=1.0)
            next_at += 1.0 / rate
        world.step()
        waited = max(waited, len(world.it.requests.waiting))
    assert waited <= 2
    trained = world.it.stats.backward_rows + world.it.stats.kept_rows - before
    assert trained > 500
    assert world.worst_gap() < 2.0
