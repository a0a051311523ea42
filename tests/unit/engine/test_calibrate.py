"""Measurements of an engine before it serves requests."""

from typing import Any

import pytest

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.plan import Plan, StepResult
from coserve.engine.calibrate import measure, measure_lanes
from models import tiny


def make_engine(**changes: Any) -> Engine:
    config = {"calibrate": False, "cache_tokens": 1024, "page_size": 8, **changes}
    return Engine(tiny("llama"), EngineConfig(**config))


def measured(engine: Engine) -> tuple[float, float] | None:
    config = engine.config
    return measure_lanes(engine.executor, engine.base, config.page_size, config.pages)


def test_lanes_are_measured_and_nothing_remains() -> None:
    engine = make_engine()
    few = SamplingParams(max_tokens=4)
    before = list(engine.generate([5, 17, 3], sampling=few))
    found = measured(engine)
    assert found is not None and all(0.1 < factor < 100.0 for factor in found)
    assert not engine.executor.sessions and engine.executor.arena._out == 0
    assert not len(engine.executor.loaded)
    assert list(engine.generate([5, 17, 3], sampling=few)) == before


@pytest.mark.parametrize(
    "changes", [{"cache_tokens": 128}, {"max_running": 3}, {"deterministic": True}], ids=str
)
def test_without_room_or_lanes_there_is_nothing_to_measure(changes: dict[str, Any]) -> None:
    assert measured(make_engine(**changes)) is None


def test_nothing_remains_of_the_steps_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and later: once training has been paused, executors drop that of plans from before."""
    engine = make_engine()
    config = engine.config
    found = measure(engine.executor, engine.base, config.page_size, config.pages)
    engine.executor._pauses = 3
    run, trained = engine.executor.run, list[bool]()

    def watched(plan: Plan) -> StepResult:
        result = run(plan)
        trained.append(result.trained == plan.training)
        return result

    monkeypatch.setattr(engine.executor, "run", watched)
    again = measure(engine.executor, engine.base, config.page_size, config.pages)
    assert [features.values for features, _ in again] == [features.values for features, _ in found]
    assert all(trained)
    assert not engine.executor.sessions and engine.executor.arena._out == 0
    assert not len(engine.executor.loaded)


def test_an_engine_that_calibrates_knows_its_lanes() -> None:
    lanes = make_engine(calibrate=True).scheduler.cost.lanes
    assert (lanes.inference, lanes.training) != lanes.UNKNOWN
