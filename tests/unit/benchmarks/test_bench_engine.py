import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from coserve.core.compact import rounded
from coserve.errors import ConfigError
from coserve_benchmarks.engine import GROUPS, run_engine
from coserve_benchmarks.plans import load_plans, whole_journeys
from coserve_benchmarks.report import draw, print_report
from coserve_benchmarks.results import BARS, REMOTE_BARS
from forked_executors import fork_executors


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_on_a_tiny_shape(group: str, tmp_path: Path) -> None:
    results = run_engine("tiny", quick=True, only=[group], plans=tmp_path / "plans.json")
    measured = [key for key in BARS if key in results]
    for key in measured:
        # On a busy machine the overhead, a difference of two times, may be negative, and on a metered device,
        # whose time is real, no answer may be in time.
        may_be_none = key == "step.overhead" or (key.startswith("metered.") and results[key] == 0)
        assert math.isfinite(results[key]) and (results[key] > 0 or may_be_none), key
    assert set(results["spreads"]) <= set(results["spreads_are"])
    assert measured or group == "coserve"  # whose denominators the others measure
    assert any(name.startswith(f"{group}.") for name in results["figures"])
    assert all(math.isfinite(figure["value"]) for figure in results["figures"].values())
    if group == "coserve":
        assert whole_journeys(load_plans(tmp_path / "plans.json"))
    console = Console(width=120, record=True)
    print_report(results, console)
    text = console.export_text()
    assert all(key in text for key in measured)
    assert all(key not in text for key in BARS if not any(key in other for other in measured))


@pytest.mark.slow
def test_the_whole_table_on_a_tiny_shape(tmp_path: Path) -> None:
    results = run_engine("tiny", quick=True, json_path=tmp_path / "bench.json", plans=tmp_path / "plans.json")
    measured = set(BARS) - {"inference.vs_llama_cpp", "inference.vs_vllm"}  # of other environments
    for key in measured:
        assert math.isfinite(results[key]) and results[key] > 0, key
    assert set(results["bars"]) == set(BARS)
    assert set(results["met"]) == {key for key, bar in BARS.items() if bar is not None}
    assert results["floors"]["inference.ours"] > results["figures"]["inference.ours"]["value"]
    assert json.loads((tmp_path / "bench.json").read_text())["figures"] == rounded(results["figures"])
    assert whole_journeys(load_plans(tmp_path / "plans.json"))

    console = Console(width=120, record=True)
    print_report(results, console)
    text = console.export_text()
    assert all(key in text for key in measured)
    draw(results, tmp_path / "bench.svg")
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are inference, finetune, blocking, coserve"):
        run_engine("tiny", only=["speed"])


@pytest.mark.slow
def test_what_a_remote_executor_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_executors(monkeypatch)
    results = run_engine("tiny", quick=True, json_path=tmp_path / "bench.json", executor="remote")
    assert all(results[key] > 0 for key in REMOTE_BARS)
    with pytest.raises(ConfigError, match="executor must be local or remote"):
        run_engine("tiny", quick=True, executor="elsewhere")
