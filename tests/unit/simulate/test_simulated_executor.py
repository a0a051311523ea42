"""The simulated executor against the scripted one, which checks all that it is given."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from coserve.core.events import StepDone
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment, TrainingSegment
from coserve.core.request import SLO, Request, SamplingParams
from coserve.core.sequence import Direction, MicroBatch, Span
from coserve.executors.executor import Executor
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.swap_tier import SwapTier
from coserve.schedule.swapping import Swapping
from coserve.simulate.simulated import SimulatedExecutor
from coserve.simulate.virtual_clock import VirtualClock
from scripted_executor import ScriptedExecutor

LAYERS = 4


def run(make: Callable[[], VirtualClock], policy: str, pages: int, steps: int) -> list[tuple[float, float]]:
    """(clock, seconds) after each step of answers with scored prompts beside a job of five optimizer
    steps."""
    cost = CostModel()
    cache = BaseCache(SchedulerConfig(LAYERS, 256), PagePool(pages, 4), Swapping(cost, 8, SwapTier(8, 1e-5)))
    scheduler = Scheduler(cache, cost, make_policy(policy))
    executor, found, left = make(), [], 5
    for number in range(12):
        sampling = SamplingParams(
            max_tokens=6, ignore_eos=True, prompt_logprobs=0 if number % 3 == 0 else None
        )
        request = Request(
            str(number), tuple(range(5 + number)), sampling, None, SLO(end_to_end=0.4), scope=None
        )
        scheduler.requests.submit(request, 0.0)
    for _ in range(steps):
        if left and not scheduler.training.has_work:
            batch = MicroBatch(
                scheduler.new_key(), "job", "job@0", (9, 7), LAYERS, tokens=(0,) * 16, labels=(1,) * 16
            )
            scheduler.training.add("job", [batch])
        if not scheduler.has_work:
            break
        left -= sum(isinstance(event, StepDone) for event in executor.step(scheduler))
        found.append((executor.now, cost.error))
    assert scheduler.stats.updates == 5 and scheduler.stats.finished == 12
    return found


@pytest.mark.parametrize("policy", ["hybrid", "adaptive", "spatial", "temporal:3,grain=batch", "idle-only"])
@pytest.mark.parametrize("pages", [200, 14])
@pytest.mark.parametrize("ahead", [0, 1])
def test_both_take_the_same_steps_at_the_same_times(policy: str, pages: int, ahead: int) -> None:
    def scripted() -> VirtualClock:
        return ScriptedExecutor(4, plans_ahead=ahead, swap_pages=8, swap_seconds=(1e-4, 2e-4))

    def simulated() -> VirtualClock:
        return SimulatedExecutor(
            CostModel().predict, plans_ahead=ahead, swap_pages=8, swap_seconds=(1e-4, 2e-4)
        )

    assert run(simulated, policy, pages, 800) == run(scripted, policy, pages, 800)


def test_it_is_an_executor_that_needs_no_torch() -> None:
    executor: Executor = SimulatedExecutor(CostModel().predict, swap_pages=3)
    assert executor.spec.swap_pages == 3
    code = "import sys, coserve.simulate.simulated; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_each_step_is_observed_with_the_time_at_which_it_began() -> None:
    seen: list[tuple[BasePlan, BaseResult, float]] = []
    executor = SimulatedExecutor(lambda plan: 2.0, host=lambda: 0.5, observe=lambda *step: seen.append(step))
    executor.skip(1.0)
    executor.run(BasePlan(released=(7,)))
    executor.run(BasePlan(idle=3.0))
    assert [(result.seconds, began) for _, result, began in seen] == [(2.0, 1.0), (0.0, 3.5)]
    assert executor.now == 6.5


def test_answers_and_training_are_slower_beside_each_other_by_what_is_given() -> None:
    window = TrainingSegment(9, "job", "job@0", 0, 4, 10, Direction.TRAIN_FORWARD, Span(0, 2), LAYERS)
    begin = InferenceSegment(1, 0, 3, 0, 1, request=Request("r", (0, 0, 0)))
    first = BasePlan((begin,), (window,), share=0.5)
    executor = SimulatedExecutor(lambda plan: 1.0, interference=(1.5, 3.5))
    result = executor.run(first)
    assert (result.seconds, result.stream_seconds, result.trained) == (1.5, (1.5, 0.0), ())
    for number, trained in ((1, ()), (2, (window,))):
        result = executor.run(BasePlan((InferenceSegment(1, 2 + number, 1, 2 + number, 1),), share=0.5))
        assert result.trained == trained
    assert result.stream_seconds == (1.5, 3.5) and executor.now == 4.5
