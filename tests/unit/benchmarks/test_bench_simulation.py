"""The check of the simulator: costs from watched steps, errors of pairs, tables, and its quick groups."""

import json
import random
from pathlib import Path

import pytest

from coserve import Engine, EngineConfig
from coserve.core.plan import BasePlan, BaseResult, InferenceSegment
from coserve.core.request import Request, SamplingParams
from coserve.engine.calibrate import Calibration
from coserve.memory.pages import PagePool
from coserve.schedule.base_cache import BaseCache
from coserve.schedule.config import SchedulerConfig
from coserve.schedule.cost import CostModel
from coserve.schedule.features import Features, StepFeatures
from coserve.schedule.policies import make_policy
from coserve.schedule.scheduler import Scheduler
from coserve.simulate.replay import AnswerTimes, LoadResult
from coserve.simulate.simulated import SimulatedExecutor
from coserve_benchmarks.redraw import redraw
from coserve_benchmarks.rows_page import render
from coserve_benchmarks.simulation import real as runs
from coserve_benchmarks.simulation.papers.flexllm_figures import METHODS, memory_series
from coserve_benchmarks.simulation.real import Pace, Pair, StepRecorder, Timings
from coserve_benchmarks.simulation.run import run_check
from models import tiny
from steps import step_plan, step_result

TRUE = {"step": 3e-3, "forward_layers": 2e-2, "forward_rows": 4e-4, "decode_context": 2e-6}


def scheduler() -> Scheduler:
    return Scheduler(BaseCache(SchedulerConfig(4, 512), PagePool(64, 16)), CostModel(), make_policy("hybrid"))


def test_costs_are_those_of_the_steps_that_were_watched() -> None:
    """Steps of known costs, one in fifty disturbed."""
    truth, watched, draw = CostModel(TRUE), scheduler(), random.Random(1)
    recorder = StepRecorder(watched)
    plans = [
        BasePlan(inference=tuple(InferenceSegment(n, c, rows, c, 1) for n in range(draw.randrange(1, 9))))
        for rows in (1, 1, 1, 16, 64)
        for c in (10, 100, 300)
        for _ in range(20)
    ]
    with recorder.watching():
        for number, plan in enumerate(plans):
            longer = 2.0 if number % 50 == 0 else 1.0
            taken = BaseResult(truth.predict(plan) * draw.gauss(1.0, 0.01) * longer)
            watched.cost.observe(StepFeatures.of(step_plan(plan)), step_result(taken))
    model = recorder.costs(watched.cost.first)
    errors = [abs(model.predict(plan) / truth.predict(plan) - 1) for plan in plans]
    assert max(errors) < 0.1 and sum(errors) / len(errors) < 0.04
    jitter = recorder.jitter(model)
    assert 0.005 < jitter.deviation < 0.05
    assert jitter.share == pytest.approx(0.02, abs=0.01) and jitter.longer == pytest.approx(2.0, rel=0.2)
    weights = recorder.weights(model, jitter)
    together = CostModel(weights).predict
    seconds = sum(taken for _, taken in recorder.samples)
    assert sum(map(together, plans)) * jitter.mean == pytest.approx(seconds)
    assert len(recorder.samples) == len(plans)
    watched.cost.observe(StepFeatures.of(step_plan(plans[0])), step_result(BaseResult(1.0)))
    assert len(recorder.samples) == len(plans)  # the watch is over


def test_steps_are_watched_through_a_scheduler() -> None:
    watched = scheduler()
    executor, recorder = SimulatedExecutor(CostModel(TRUE).predict), StepRecorder(watched)
    watched.requests.submit(Request("r", (0,) * 8, SamplingParams(max_tokens=6, ignore_eos=True)), 0.0)
    with recorder.watching():
        while watched.has_work:
            executor.step(watched)
    assert len(recorder.samples) == 6
    assert all(
        seconds == pytest.approx(CostModel(TRUE).predict_features(one)) for one, seconds in recorder.samples
    )


def test_errors_are_relative_to_the_real_run() -> None:
    load = LoadResult(0.0, 10.0, [AnswerTimes(1.0, [2.0, 2.5, 3.0])], [(5.0, 100.0)])
    real = Timings.of(load)
    assert (real.time_per_token, real.ttft_p99, real.training) == (0.5, 1.0, pytest.approx(10.0))
    pair = Pair("w", "p", 1.0, real, Timings(0.45, 1.2, 10.0))
    assert pair.error("time_per_token") == pytest.approx(0.1)
    assert pair.error("ttft_p99") == pytest.approx(0.2)
    assert pair.error("training") == pytest.approx(0.0)
    assert Pair("w", "p", 1.0, Timings(None, None, 0.0), real).error("training") is None


def test_the_pace_of_a_run_is_the_mean_of_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([(1.0, 4.0), (2.0, 8.0), (1.0, 2.0)])  # seconds of two steps, at each calibration

    def measure(*_: object, seconds: float) -> Calibration:
        return Calibration([(Features(), taken) for taken in next(measured)], is_certain=True)

    monkeypatch.setattr(runs, "measure", measure)
    pace = Pace(Engine(tiny("llama"), EngineConfig(calibrate=False)))
    assert (pace.since_last(), pace.since_last()) == (1.5, pytest.approx((2 + 0.75) / 2))


def test_steps_of_a_run_are_divided_by_its_pace() -> None:
    recorder = StepRecorder(scheduler())
    recorder.samples = [(Features(), 1.0), (Features(), 3.0)]
    recorder.paced(1, 1.5)
    assert [seconds for _, seconds in recorder.samples] == [1.0, 2.0]


def test_the_quick_groups_write_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    run_check("tiny", True, ("scale", "flexllm"), path)
    found = json.loads(path.read_text())
    assert (
        found["events_per_second"] > 0 and found["scheduler.growth"] > 0 and 0 < found["flexllm.kept"] < 1.5
    )
    page = render(found)
    assert "`scheduler.growth`" in page and "OPT-13B: 4 A100" in page and "there" in page
    *_, last = found["series"]["flexllm.fig16"]
    assert last[0] == pytest.approx(12.0, abs=0.1) and min(last) > 0 and last[3] < 1
    redraw(path, tmp_path / "figures.svg")
    drawn = (tmp_path / "figures.svg").read_text()
    assert "(figure 12)" in drawn and "(figure 13)" not in drawn and "(figure 16)" in drawn


@pytest.mark.slow
def test_what_is_kept_of_training_is_less_than_half_of_what_plain_torch_keeps(tmp_path: Path) -> None:
    series = memory_series("19m")
    held = {(name, system): rest for name, system, *rest in series["flexllm.fig13"]}
    for method in METHODS:
        assert (
            held[method, "coserve"][2] < 0.5 * held[method, "torch"][2] < held["full fine-tuning", "torch"][2]
        )
    results = tmp_path / "check.json"
    results.write_text(
        json.dumps({"series": series | {"flexllm.fig12[A]": [[1, 2, 3]], "flexllm.fig16": [[1, 2, 3, 0.4]]}})
    )
    redraw(results, tmp_path / "figures.svg")
    assert "bottleneck, plain torch" in (tmp_path / "figures.svg").read_text()
