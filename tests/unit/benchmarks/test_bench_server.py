"""The server's bench on a tiny shape, but for its kills: those have a scenario of their own."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.kills import Outcome
from coserve_benchmarks.machine import measure_machine
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.report import print_report
from coserve_benchmarks.results import SERVER_BARS, Results
from coserve_benchmarks.served import Victim
from coserve_benchmarks.server import run_server
from coserve_benchmarks.settings import settings_for
from coserve_benchmarks.survival import tell


def test_what_does_not_kill_on_a_tiny_shape(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    results = run_server("tiny", quick=True, only=["overhead", "latency", "restart"], json_path=file)
    for key in ("overhead.ratio", "first_byte_p99_ms", "restart.ready_s"):
        assert math.isfinite(results[key]) and results[key] > 0, key
    assert set(results["bars"]) == set(SERVER_BARS) and set(results["met"]) == {
        "overhead.ratio",
        "restart.ready_s",
    }
    assert results["floors"]["overhead.http"] > results["figures"]["overhead.http"]["value"]
    assert results["figures"]["first_byte.trained"]["value"] > 0
    assert results["restart.ready_s"] > results["figures"]["restart.load_s"]["value"]
    assert json.loads(file.read_text())["figures"] == results["figures"]
    console = Console(width=140, record=True)
    print_report(results, console)
    assert all(key in console.export_text(clear=False) for key in SERVER_BARS)


def outcome(victim: Victim, **fields: object) -> Outcome:
    peaceful = {
        "live": 16, "training": 2, "continued": 16, "same": 16, "streams": 16, "longest_gap": 2.0,
        "ready_after": 1.0, "acknowledged": 50, "lost": (), "wrong": (),
    }  # fmt: skip
    return Outcome(victim, **{**peaceful, **fields})  # type: ignore[arg-type]


def test_what_kills_did_is_counted() -> None:
    results = Results({}, None, SERVER_BARS)
    bench = Bench(shape_named("tiny"), settings_for("tiny", True), measure_machine(quick=True), results)
    outcomes = [
        outcome(Victim.ENGINE),
        outcome(Victim.ENGINE, continued=15, longest_gap=3.0),
        outcome(Victim.API, continued=0, same=8, longest_gap=9.0),
        outcome(Victim.EVERYTHING, continued=0, lost=("file f",), wrong=("job j",)),
    ]
    tell(bench, outcomes, ["file f", "event e"], 0.5)
    found = results.as_dict()
    assert found["kill.lost_acknowledged"] == 2
    assert found["kill.streams_continued"] == 31 / 32
    assert found["kill.longest_gap_s"] == 3.0
    assert found["met"] == {"kill.lost_acknowledged": False, "kill.streams_continued": False}
    assert found["figures"]["kill.streams_asked_again"]["value"] == 24 / 32
    assert {"file f", "event e", "job j"} <= set(found["notes"].values())


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are overhead, latency, restart, kills"):
        run_server("tiny", only=["speed"])
