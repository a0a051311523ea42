"""A simulated machine: where arrivals stop its training."""

import random

from coserve.core.plan import BasePlan, BaseResult
from coserve.core.request import SLO
from coserve.schedule.features import DEFAULT_WEIGHTS
from coserve.simulate.jitter import Jitter
from coserve.simulate.machine import MachineSettings, SimulatedMachine
from coserve.simulate.times import WeightedTimes
from coserve.workload.requests import TimedJob, TimedRequest

TIMES = WeightedTimes(DEFAULT_WEIGHTS, 8)


def test_an_arrival_stops_training_behind_the_layer_under_way() -> None:
    """Layers of a step's training take equal parts of what it adds to the step, after the answers' rows."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw, steps = random.Random(seed), list[tuple[BasePlan, BaseResult, float]]()
    settings = MachineSettings(jitter=Jitter(0.0, 0.0), scheduler={"interruptible": True, "slowdown": None})
    machine = SimulatedMachine("hybrid", TIMES, settings, 0)
    machine.executor.observe = lambda plan, result, began: steps.append((plan, result, began))
    machine.start(TimedJob(0.0, "job", ((0,) * 300,) * 8, 8, epochs=1000))
    arrivals, stopped, whole = list[float](), 0, 0
    for _ in range(150):
        if draw.random() < 0.1:
            machine.ask(TimedRequest(machine.clock(), (0,) * 20, draw.randint(1, 9), slo=SLO()), 0.0)
        arrivals.append(machine.clock() + draw.choice([0.0, draw.uniform(0.0, 1.5)]))
        machine.step(lambda _: arrivals[-1])
    for (plan, result, began), arrival in zip(steps, arrivals, strict=True):
        layers = sum(len(segment.span) for segment in plan.training)
        if not (layers and plan.pausable):
            continue
        inference = TIMES.predict(BasePlan(inference=plan.inference))
        each = (TIMES.predict(plan) - inference) / layers
        passed = next((n for n in range(1, layers) if began + inference + n * each > arrival), layers)
        assert sum(len(segment.span) for segment in result.trained) == passed
        stopped, whole = stopped + (passed < layers), whole + (passed == layers)
    assert stopped > 10 and whole > 10
