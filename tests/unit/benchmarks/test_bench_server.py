"""The server's bench on a tiny shape. What kills leave is a scenario of its own."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from coserve.core.compact import rounded
from coserve.errors import ConfigError
from coserve_benchmarks.report import print_report
from coserve_benchmarks.results import SERVER_BARS
from coserve_benchmarks.server import run_server

KEYS = {"overhead": "overhead.ratio", "latency": "first_byte_p99_ms", "restart": "restart.ready_s"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", KEYS)
def test_a_group_on_a_tiny_shape(group: str) -> None:
    results = run_server("tiny", quick=True, only=[group])
    assert [key for key in KEYS.values() if key in results] == [KEYS[group]]
    assert math.isfinite(results[KEYS[group]]) and results[KEYS[group]] > 0


@pytest.mark.slow
def test_the_whole_table_on_a_tiny_shape(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    results = run_server("tiny", quick=True, json_path=file)
    for key in KEYS.values():
        assert math.isfinite(results[key]) and results[key] > 0, key
    assert set(results["bars"]) == set(SERVER_BARS) and set(results["met"]) == {
        "overhead.ratio",
        "restart.ready_s",
    }
    assert results["floors"]["overhead.http"] > results["figures"]["overhead.http"]["value"]
    assert results["figures"]["first_byte.trained"]["value"] > 0
    assert results["restart.ready_s"] > results["figures"]["restart.load_s"]["value"]
    assert json.loads(file.read_text())["figures"] == rounded(results["figures"])
    console = Console(width=140, record=True)
    print_report(results, console)
    assert all(key in console.export_text(clear=False) for key in SERVER_BARS)


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are overhead, latency, restart"):
        run_server("tiny", only=["speed"])
