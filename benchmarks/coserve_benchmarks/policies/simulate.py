"""`coserve bench policies --simulated`: every policy, traffic and load, hundreds of requests a cell."""

import json
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json
from coserve.errors import ConfigError
from coserve.simulate.jitter import Jitter
from coserve.workload.trace_formats import read_trace
from coserve_benchmarks.policies.cells import FIGURES, LOADS, REQUESTS, CellRunner, SimulatedTestbed, traffics
from coserve_benchmarks.policies.check import check
from coserve_benchmarks.policies.fitted import RoundSettings
from coserve_benchmarks.policies.run import TRACED
from coserve_benchmarks.simulated import TWO_CORES

CHECK: Final = "check"  # the group in real time; only where it is asked for
SECTION: Final = "cells"  # of the JSON, by traffic and load; what a simulated contest is known by
_VOCABULARY: Final = 1000


def run_simulated(
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
    trace: str | Path | None = None,
    further: bool = False,
    loads: Collection[float] = LOADS,
    requests: int = REQUESTS,
    shape: str = "tiny",
    policies: Collection[str] = (),
) -> dict[str, Any]:
    """Runs the contests of some traffics (all, by default; without a `trace` none that replays one) at each
    load. With `further` what `json_path` has of other traffics stays. The group `CHECK` runs the real engine
    on a `shape` in real time. `policies` are all where none is given. Raises ConfigError or DataError."""
    rows = () if trace is None else read_trace(trace)
    known = traffics(traced=trace is not None)
    names = tuple(known) if only is None else tuple(only)
    if unknown := set(names) - {*known, CHECK}:
        missing = " without --trace" if unknown <= set(TRACED) else ""
        there = ", ".join([*known, CHECK])
        raise ConfigError(f"there is no simulated traffic {sorted(unknown)}{missing}; there are {there}")
    path = None if json_path is None else Path(json_path)
    earlier = _earlier(path) if further and path is not None and path.exists() else {}
    found: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "groups": list(names),
        "code": measured_code(),
        "date": _now(),
        "ended": None,
        "requests": requests,
        "weights": dict(TWO_CORES),
        "jitter": asdict(Jitter()),
        "figures": list(FIGURES),
        **{key: earlier[key] for key in (CHECK, "earlier") if key in earlier},
        SECTION: {name: cells for name, cells in earlier.get(SECTION, {}).items() if name not in names},
    }
    if earlier:
        run = {key: earlier[key] for key in ("groups", "code", "date", "ended")}
        found["earlier"] = [*earlier.get("earlier", ()), run]
    if CHECK in names:
        found[CHECK] = check(shape, requests)
        _save(found, path)
    for name in (name for name in names if name != CHECK):
        found[SECTION][name] = {}
        for load in loads:
            runner = CellRunner(
                SimulatedTestbed(), RoundSettings(1.0, _VOCABULARY, rows), load, requests, policies
            )
            known[name](runner)
            found[SECTION][name][f"{load:g}"] = runner.column
            _save(found, path)
    found["ended"] = _now()
    _save(found, path)
    return found


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} holds no results of this bench to go on with") from error
    if not isinstance(found, dict) or found.get("figures") != list(FIGURES):
        raise ConfigError(f"{path} holds no results of this bench to go on with")
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _save(found: Mapping[str, Any], path: Path | None) -> None:
    """Writes the JSON in one move."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(compact_json(dict(found)), encoding="utf-8")
        draft.replace(path)
