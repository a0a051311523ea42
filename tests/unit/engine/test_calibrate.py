"""Measurements of an engine before it serves requests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coserve import Engine, EngineConfig, SamplingParams
from coserve.core.plan import BasePlan, BaseResult
from coserve.engine import calibrate
from coserve.engine.calibrate import _GPU_SIZES, _GRAPH, Calibration, measure, measure_interference
from coserve.schedule.cost import CostModel
from coserve.schedule.features import NAMES, Features
from coserve.worker.cuda_graphs import PassGraphs, Run, rerun
from coserve.worker.fused_pass import FusedPass
from models import tiny

PATIENCE = 600.0  # seconds


def make_engine(**changes: Any) -> Engine:
    config = {"calibrate": False, "cache_tokens": 1024, "page_size": 8, **changes}
    return Engine(tiny("llama"), EngineConfig(**config))


def measured(engine: Engine) -> tuple[float, float] | None:
    config = engine.config
    return measure_interference(engine.executor, engine.base, config.page_size, config.pages)


def test_interference_is_measured_and_nothing_remains() -> None:
    engine = make_engine()
    few = SamplingParams(max_tokens=4)
    before = list(engine.generate([5, 17, 3], sampling=few))
    found = measured(engine)
    assert found is not None and all(0.0 < factor < 1e9 for factor in found)  # on a busy machine, too
    assert not engine.executor.worker.sessions and engine.executor.worker.arena._out == 0
    assert not len(engine.executor.worker.loaded)
    assert list(engine.generate([5, 17, 3], sampling=few)) == before


@pytest.mark.parametrize(
    "changes", [{"cache_tokens": 128}, {"max_running": 3}, {"deterministic": True}], ids=str
)
def test_without_room_or_streams_there_is_nothing_to_measure(changes: dict[str, Any]) -> None:
    assert measured(make_engine(**changes)) is None


def test_nothing_remains_of_the_steps_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and later: once training has been paused, executors drop that of plans from before."""
    engine = make_engine()
    config = engine.config
    room = engine.executor, engine.base, config.page_size, config.pages
    found = measure(*room, seconds=PATIENCE).samples
    engine.executor.worker._pauses = 3
    run, trained = engine.executor.run, list[bool]()

    def watched(plan: BasePlan) -> BaseResult:
        result = run(plan)
        trained.append(result.trained == plan.training)
        return result

    monkeypatch.setattr(engine.executor, "run", watched)
    again = measure(*room, seconds=PATIENCE).samples
    assert [features.counted() for features, _ in again] == [features.counted() for features, _ in found]
    assert all(trained)
    assert not engine.executor.worker.sessions and engine.executor.worker.arena._out == 0
    assert not len(engine.executor.worker.loaded)


def test_an_engine_that_calibrates_knows_its_interference() -> None:
    slower = make_engine(calibrate=True).scheduler.cost.first.interference
    assert (slower.inference, slower.training) != slower.UNKNOWN


def measured_at(
    monkeypatch: pytest.MonkeyPatch, taken: Callable[[int], float], seconds: float
) -> Calibration:
    """A calibration in which each step of the n-th round takes `taken(n)` seconds."""
    engine = make_engine()
    config, run, first = engine.config, engine.executor.run, list[list[float]]()

    def timed(plan: BasePlan) -> BaseResult:
        kind = Features.of(plan).counted()
        first.extend([kind] * (not first or kind == first[0]))
        return replace(run(plan), seconds=taken(len(first) - 1))

    monkeypatch.setattr(engine.executor, "run", timed)
    return measure(engine.executor, engine.base, config.page_size, config.pages, seconds=seconds)


def test_steps_are_run_again_until_two_runs_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (9.0, 5.0, 2.0, 2.1)
    found = measured_at(monkeypatch, lambda n: busy[n], seconds=PATIENCE)
    assert found.is_certain and {seconds for _, seconds in found.samples} == {2.0}
    found = measured_at(monkeypatch, lambda n: 2.0**-n, seconds=PATIENCE)
    assert not found.is_certain and {seconds for _, seconds in found.samples} == {2.0**-5}


def test_without_time_the_smallest_steps_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_at(monkeypatch, lambda n: (1.0, 0.1)[n], seconds=0.0)
    whole = measured_at(monkeypatch, lambda n: 1.0, seconds=PATIENCE)
    assert not found.is_certain and {seconds for _, seconds in found.samples} == {1.0}
    kinds = [features.counted() for features, _ in whole.samples]
    assert 0 < len(found.samples) < len(kinds) / 2
    assert all(features.counted() in kinds for features, _ in found.samples)


def test_what_windows_cost_is_not_taken_for_what_adapters_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window takes 12 ms beside its rows, and an adapter of answers a tenth of a millisecond: planned with
    more, answers would leave no time to training."""
    engine = make_engine()
    config, run = engine.config, engine.executor.run
    parts = {"forward_layers": 2e-3, "adapters": 1e-4, "windows": 12e-3}
    truth = CostModel(dict.fromkeys(NAMES, 1e-6) | parts)
    monkeypatch.setattr(engine.executor, "run", lambda plan: replace(run(plan), seconds=truth.predict(plan)))
    cost = CostModel()
    cost.fit(measure(engine.executor, engine.base, config.page_size, config.pages, seconds=PATIENCE).samples)
    assert {name: cost.weights[name] for name in parts} == pytest.approx(parts, rel=0.05)


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_measured_tells_what_a_pass_costs(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are those of a machine on which a pass takes 7 ms, 37 more where it is launched kernel by
    kernel, and another 3 with decode rows among others."""
    model = tiny("llama", max_position_embeddings=8192)
    config = EngineConfig(calibrate=False, cache_tokens=8192, page_size=8)
    engine = Engine(model, config)
    run = engine.executor.run
    passes = {"step": 1e-3, "forward_layers": 7e-3, "prefill_layers": 37e-3, "mixed_layers": 3e-3}
    truth = CostModel(dict.fromkeys(NAMES, 1e-6) | passes)
    truth.graphs = graphs

    def timed(plan: BasePlan) -> BaseResult:
        seconds = truth.predict(plan)
        return replace(run(plan), seconds=seconds)

    monkeypatch.setattr(engine.executor, "run", timed)
    found = measure(engine.executor, engine.base, config.page_size, config.pages, seconds=PATIENCE)
    cost = CostModel()
    cost.graphs = graphs
    cost.fit(found.samples)
    assert {name: cost.weights[name] for name in passes} == pytest.approx(passes, rel=0.02)
    kinds = [features.counted() for features, _ in found.samples]
    prompts = [kind for kind in kinds if kind["mixed_layers"] and not kind["windows"]]
    assert len(prompts) == 2, "prompts beside decode rows, also where no adapter can train"


def test_steps_that_were_measured_have_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the like of them capture nothing while answers wait, and are timed as they will be run."""
    captured = list[Run]()

    def record(work: Run) -> Run:
        captured.append(work)
        return rerun(work)

    monkeypatch.setattr(FusedPass, "recorder", lambda _: record)
    monkeypatch.setattr(PassGraphs, "prepare", lambda *_: None)
    config = EngineConfig(calibrate=False, cache_tokens=1 << 13, max_running=16)
    engine = Engine(tiny("llama", max_position_embeddings=512), config)
    assert measure(engine.executor, engine.base, config.page_size, config.pages, seconds=PATIENCE).samples
    before = len(captured)
    assert before
    few = SamplingParams(max_tokens=2 * _GRAPH, ignore_eos=True)
    handles = [engine.generate([5] * 250, sampling=few, text=False) for _ in range(16)]
    engine.run()
    assert all(len(handle.tokens) == 2 * _GRAPH for handle in handles) and len(captured) == before


def test_a_gpu_s_steps_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows pass while weights are read, and tell nothing of what a row costs."""
    config = EngineConfig(calibrate=False, cache_tokens=1 << 16, max_running=128)
    engine = Engine(tiny("llama", max_position_embeddings=4096), config)
    room = engine.executor, engine.base, config.page_size, config.pages
    small = measure(*room, seconds=0.0).samples
    monkeypatch.setattr(calibrate, "_SIZES", _GPU_SIZES)
    large = measure(*room, seconds=PATIENCE).samples
    rows = [max(features.counted()["forward_rows"] for features, _ in found) for found in (small, large)]
    assert rows[0] <= 256 and rows[1] >= 2048
