"""Steps of a schedule of one base, on an executor without a `StepLoop`, for tests."""

from collections.abc import Callable, Mapping

from coserve import Engine
from coserve.core.events import Event
from coserve.core.plan import BasePlan, BaseResult, StepPlan, StepResult
from coserve.core.request import BASE
from coserve.executors.executor import Executor
from coserve.schedule.cost import CostModel
from coserve.schedule.features import DEFAULT_WEIGHTS, Features, StepFeatures
from coserve.schedule.scheduler import Scheduler
from coserve.schedule.step_costs import StepCosts


def step_costs(weights: Mapping[str, float] = DEFAULT_WEIGHTS) -> StepCosts:
    """Costs of steps of one base."""
    return StepCosts(CostModel(weights))


def step_plan(plan: BasePlan) -> StepPlan:
    """A step of one base."""
    return StepPlan({BASE: plan})


def step_result(result: BaseResult) -> StepResult:
    """The result of a step of one base."""
    return StepResult({BASE: result})


def step_features(features: Features) -> StepFeatures:
    """Features of a step of one base."""
    return StepFeatures({BASE: features})


def apply(scheduler: Scheduler, result: BaseResult, now: float) -> list[Event]:
    """Applies the result of the oldest plan under way. Returns the events."""
    return scheduler.apply(step_result(result), now).get(BASE, [])


def run(scheduler: Scheduler, executor: Executor, now: float) -> tuple[BasePlan, BaseResult]:
    """Plans and runs a step."""
    plan = scheduler.plan(now).only
    return plan, executor.run(plan)


def run_steps_by(engine: Engine, run: Callable[[BasePlan], BaseResult]) -> None:
    """Has `run` run the plans of an engine's only base."""
    engine.loop.executor.run = lambda plan: step_result(run(plan.only))  # type: ignore[method-assign]
