"""The overlap of plans: its arithmetic, and the executors that it comes from."""

import random
from dataclasses import replace

import pytest

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.plan import BasePlan
from coserve.errors import ConfigError
from coserve.executors.executor import ExecutorSpec
from coserve.executors.local import LocalExecutor
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.overlap import Overlap
from coserve.simulate.pipelined import PipelinedExecutor, StageSeconds
from models import tiny


def test_one_plan_at_once_waits_for_no_other() -> None:
    alone = Overlap()
    for count in range(9):
        assert (alone.share(count), alone.beside(count)) == (count, 0)
        assert alone.interval(count) == alone.saved(count) == alone.own_host(count, 3.0) == count
    assert alone.cuts_layers


def test_plans_at_once_share_sequences_seconds_and_slack() -> None:
    draw = random.Random(5)
    for _ in range(200):
        plans, rate = draw.randint(2, 8), draw.uniform(1.0, 8.0)
        several, count = Overlap(plans, rate), draw.randint(0, 40)
        parts = [len(range(first, count, plans)) for first in range(plans)]
        assert several.share(count) == max(parts)
        assert several.beside(count) == min(count, plans - 1)
        assert several.interval(rate) == pytest.approx(1.0)
        assert several.own_host(0.3, 0.2) == 0.2 and several.own_host(0.1, 0.2) == 0.1
        assert several.saved(1.0) == 0.0 and not several.cuts_layers


@pytest.mark.parametrize("overlap", [Overlap(0), Overlap(2, 0.5)])
def test_an_executor_runs_a_plan_at_least(overlap: Overlap) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.overlap is out of its range"):
        SchedulerConfig(4, 64, overlap=overlap)


def test_a_pipeline_says_that_it_runs_a_plan_for_each_stage() -> None:
    pipeline = PipelinedExecutor(3, lambda plan: StageSeconds((0.1,) * 3, (0.0,) * 3))
    assert (pipeline.spec.plans, pipeline.spec.plan_rate, pipeline.plans_ahead) == (3, 3.0, 2)


def test_an_engine_has_as_many_plans_under_way_as_its_executor_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are those of an executor of one plan; no row is launched before the token that it needs."""
    alone, most = _answers()
    assert most == 1
    own = LocalExecutor.spec.fget
    assert own is not None

    def spec(executor: LocalExecutor) -> ExecutorSpec:  # type: ignore[type-arg]
        return replace(own(executor), plans=3, plan_rate=3.0)

    monkeypatch.setattr(LocalExecutor, "spec", property(spec))
    assert _answers() == (alone, 3)


def _answers() -> tuple[list[list[int]], int]:
    """Tokens of some answers, and the most plans with rows under way at once."""
    engine = Engine(tiny("llama"), EngineConfig(calibrate=False, cache_tokens=512, page_size=8))
    launched, most, executor = list[BasePlan](), 0, engine.executor
    launch, collect = executor.launch, executor.collect

    def launches(plan: BasePlan) -> None:
        nonlocal most
        keys = {one.key for one in plan.inference}
        assert all(keys.isdisjoint(one.key for one in other.inference) for other in launched)
        launched.append(plan)
        most = max(most, sum(bool(one.inference) for one in launched))
        launch(plan)

    def collects(wait: bool = True) -> object:
        launched.pop(0)
        return collect(wait)

    executor.launch, executor.collect = launches, collects  # type: ignore[assignment,method-assign]
    answers = [engine.generate([5, 6, 7 + n], sampling=SamplingParams(max_tokens=6)) for n in range(7)]
    engine.run()
    return [list(answer.result().tokens) for answer in answers], most
