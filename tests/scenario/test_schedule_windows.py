"""Fused or interleaved: training beside answers is cut to each step, or steps without any make room for a
layer of a whole window."""

from itertools import pairwise

import pytest

from coserve.core.events import StepDone
from coserve.core.plan import BasePlan
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Sequence
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from scripted_executor import ScriptedExecutor

DEPTH, ROWS = 16, 512
# Seconds per unit. The processor is 255M parameters on two cores, rounded from a calibration: 32 rows through
# a layer and back take 8 ms, 512 rows 36 ms.
PROCESSOR = {
    "step": 1.3e-3, "forward_layers": 2.1e-2, "forward_rows": 4.6e-4,
    "window_rows": 4.6e-4, "tail_rows": 8e-5,
    "decode_context": 2.7e-6, "forward_attention": 2.6e-7, "adapters": 1e-2,
    "backward_layers": 6e-2, "backward_rows": 9.2e-4, "backward_attention": 1.1e-6,
    "loss_rows": 2e-4, "updates": 2e-2,
}  # fmt: skip
# Reading weights takes ten times as long, as from a slow link, and rows a tenth of the time.
STREAMED = PROCESSOR | {
    "forward_layers": 2.1e-1, "forward_rows": 4.6e-5,
    "window_rows": 4.6e-5, "adapters": 1e-3, "backward_layers": 2.1e-1,
    "backward_rows": 9.2e-5, "backward_attention": 1.1e-7, "loss_rows": 2e-5,
}  # fmt: skip
# No window costs anything but its rows.
ROWS_ALONE = PROCESSOR | {"backward_layers": 0.0, "adapters": 0.0, "forward_layers": 0.0, "step": 2e-2}


class World:
    """An answer of 300 tokens beside one job's micro-batch that goes back, on a machine as predicted."""

    def __init__(
        self,
        weights: dict[str, float],
        slo: SLO = SLO(),
        policy: str = "hybrid",
        way: str = "BACKWARD",
        interruptible: bool = False,
    ) -> None:
        config = SchedulerConfig(DEPTH, 4096, micro_batches_in_flight=1, interruptible=interruptible)
        self.it = Scheduler(BaseCache(config, PagePool(2048, 16)), CostModel(weights), make_policy(policy))
        for trains in (False, True) * 16:
            self.it.cost.misses.observe(1.0, trains)
        self.it.window_rows = 4 * ROWS
        self.executor = ScriptedExecutor(16, CostModel(weights).predict)
        self.batch = MicroBatch(self.it.new_key(), "job", "job@0", (4 * ROWS,), DEPTH)
        self.it.training.add("job", [self.batch])
        while self.batch.direction is not Direction[way]:
            self.step()
        request = Request("r", tuple(range(40)), SamplingParams(max_tokens=300), None, slo, self.executor.now)
        self.answer: Sequence = self.it.requests.submit(request, self.executor.now)
        self.step()

    def step(self) -> BasePlan:
        events = self.executor.step(self.it)
        assert not any(isinstance(event, StepDone) for event in events), "the micro-batch is too short"
        return self.executor.plans[-1]

    def beside(self, steps: int = 100) -> list[BasePlan]:
        """Plans of so many decode steps."""
        plans = [self.step() for _ in range(steps)]
        assert all(plan.inference for plan in plans)
        return plans


def rows_through_layers(plans: list[BasePlan]) -> int:
    return sum(segment.length * len(segment.span) for plan in plans for segment in plan.training)


def test_where_arithmetic_counts_decode_steps_come_between_the_layers_of_a_whole_window() -> None:
    """Reading a layer for 32 rows takes as long as computing with 70."""
    world = World(PROCESSOR)
    plans = world.beside()
    trained = [number for number, plan in enumerate(plans) if plan.training]
    assert {segment.length for plan in plans for segment in plan.training} == {ROWS}
    assert len(trained) > 5 and min(b - a for a, b in pairwise(trained)) > 1
    alone = CostModel(PROCESSOR).predict(BasePlan(inference=plans[-1].inference))
    taken = sum(result.seconds for result in world.executor.results[-100:])
    assert 1.4 < taken / (100 * alone) <= 1.51, "all that the slowdown of 1.5 leaves, and no more"


def test_where_reading_counts_whole_windows_ride_in_every_step() -> None:
    world = World(STREAMED, way="TRAIN_FORWARD")
    plans = world.beside(8)
    assert all(plan.training for plan in plans)
    assert {segment.length for plan in plans for segment in plan.training} == {ROWS}


@pytest.mark.parametrize(("weights", "steps", "gain"), [(PROCESSOR, 100, 1.5), (STREAMED, 6, 1.0)])
def test_the_choice_is_the_better_of_both(weights: dict[str, float], steps: int, gain: float) -> None:
    found = {
        windows: rows_through_layers(World(weights, policy=f"hybrid:{windows}").beside(steps))
        for windows in ("chosen", "fused", "interleaved")
    }
    assert found["chosen"] >= gain * found["fused"] and found["chosen"] >= 0.95 * found["interleaved"]


@pytest.mark.parametrize(
    ("slo", "rows", "seconds"), [(SLO(deferral=60.0), 4 * ROWS, 0.5), (SLO(), ROWS, 0.1)]
)
def test_patient_answers_have_windows_beside_them_as_training_alone_has(
    slo: SLO, rows: int, seconds: float
) -> None:
    world = World(PROCESSOR, slo, interruptible=True)
    plans = [plan for plan in world.beside(8 if slo.deferral else 40) if plan.training]
    assert max(segment.length for plan in plans for segment in plan.training) == rows
    assert {plan.abandons for plan in plans} == {slo.deferral is not None}
    cost = CostModel(PROCESSOR)
    longest = max(cost.predict(plan) - cost.predict(BasePlan(inference=plan.inference)) for plan in plans)
    assert 0.3 * seconds < longest <= seconds


def test_where_only_rows_cost_anything_a_window_is_cut_to_each_step() -> None:
    plans = World(ROWS_ALONE).beside(50)
    assert sum(bool(plan.training) for plan in plans) > 45
    assert min(segment.length for plan in plans for segment in plan.training) < ROWS


def test_a_bound_on_each_token_that_never_bears_a_whole_window_has_it_cut() -> None:
    world = World(PROCESSOR, SLO(between_tokens=0.045))
    plans = world.beside()
    assert sum(bool(plan.training) for plan in plans) > 90
    assert max(segment.length for plan in plans for segment in plan.training) < ROWS
    assert world.answer.slowest <= 0.045 + 1e-9
    assert (
        rows_through_layers(World(PROCESSOR, SLO(between_tokens=0.045), "hybrid:interleaved").beside()) == 0
    )


def test_no_window_waits_for_ever() -> None:
    """A slowdown of 1.005 leaves an eighth of a millisecond a step, and a whole window needs 36."""
    plans = World(PROCESSOR, SLO(slowdown=1.005)).beside(200)
    trained = [segment for plan in plans for segment in plan.training]
    assert trained and max(segment.length for segment in trained) < ROWS
