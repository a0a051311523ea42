"""`coserve bench zoo` makes its applications and counts their bytes; provisions answer every request."""

import json
from collections import Counter
from pathlib import Path

import pytest

from coserve.errors import ConfigError
from coserve_benchmarks.zoo.provision import Asked, InTurns, Swapped, Together, make_load, replay
from coserve_benchmarks.zoo.run import BARS, run_zoo
from coserve_benchmarks.zoo.serving import RunningEngine
from zoo_made import make_fine_tune, make_lora, make_model


@pytest.mark.slow
def test_the_table_is_filled(tmp_path: Path) -> None:
    results = run_zoo(True, None, tmp_path / "zoo.json", tmp_path / "chains.svg", tmp_path / "depths.svg")
    assert json.loads((tmp_path / "zoo.json").read_text())["storage.exact"] == results["storage.exact"]
    assert set(results["bars"]) == set(BARS) <= set(results)
    assert 0.0 < results["storage.with_alternatives"] <= results["storage.exact"] < 1.0
    assert "20 applications" in results["notes"]["storage.exact"]
    assert "full-6" in (tmp_path / "chains.svg").read_text()
    assert {"stitch.128-256.seconds", "surrogate.L3-5.speedup", "depths.own.accuracy"} <= set(
        results["figures"]
    )
    assert "switching every 2 layers" in (tmp_path / "depths.svg").read_text()


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no group"):
        run_zoo(True, ["other"])


def test_popularity_is_uneven_and_the_load_is_what_was_asked_for() -> None:
    names = [f"app-{number}" for number in range(12)]
    load = make_load(names, 50.0, 20.0, 90, 3)
    assert len(load) == pytest.approx(1000, abs=12) and load == make_load(names, 50.0, 20.0, 90, 3)
    counts = Counter(asked.application for asked in load)
    assert len(counts) == 12 and max(counts.values()) > 3 * min(counts.values())
    assert [asked.at for asked in load] == sorted(asked.at for asked in load)


def test_every_provision_answers_every_request(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    lora = make_lora(tmp_path / "lora", base)
    other = make_fine_tune(tmp_path / "other", base, {"layers.1": 0.5})
    prompts = [tuple(range(5, 25 + number)) for number in range(6)]
    load = [Asked(0.001 * n, ("one", "two", "three")[n % 3], prompt) for n, prompt in enumerate(prompts)]
    adapters = {"one": lora, "two": lora, "three": lora}
    for provision in (Together, InTurns):
        engine = RunningEngine(base, adapters)
        assert engine.nbytes > engine.base_nbytes
        shared = provision(dict.fromkeys(adapters, engine))
        outcome = replay(shared, load)
        assert outcome.rate > 0 and outcome.p95 > 0 and not shared.has_work
    models = {"one": (base, {"one": lora}), "two": (base, {}), "three": (other, {})}
    swapped = Swapped(lambda name: RunningEngine(*models[name]), 2)
    assert replay(swapped, load).p95 > 0
    assert swapped.loads >= 3, "three models take turns in two places"
