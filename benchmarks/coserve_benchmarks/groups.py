"""Common to all benches: choosing a shape, measuring this machine, and running groups of rows."""

import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coserve.core.checkout import measured_code
from coserve.errors import ConfigError
from coserve.workload.shapes import shape_named
from coserve_benchmarks.machine import measure_machine, measure_state
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar, Results
from coserve_benchmarks.settings import settings_for


def begin(
    shape: str,
    quick: bool,
    groups: Collection[str],
    known: Collection[str],
    json_path: str | Path | None,
    bars: Mapping[str, Bar | None],
    compiled: bool = False,
    pythons: Sequence[str] = (),
) -> Bench:
    """Measures the machine; results go to `json_path` row by row, with the code that is measured. Raises
    ConfigError for an unknown shape or group."""
    if unknown := set(groups) - set(known):
        raise ConfigError(f"there is no group {sorted(unknown)} in the bench; there are {', '.join(known)}")
    chosen, settings = shape_named(shape), settings_for(shape, quick)
    machine = measure_machine(quick=quick and shape == "tiny")
    header: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "shape": shape,
        "parameters": chosen.parameters,
        "quick": quick,
        "groups": list(groups),
        "code": measured_code(),
        "date": machine.date,
        "ended": None,  # where the run was interrupted
        "machine": machine.as_dict(),
    }
    return Bench(chosen, settings, machine, Results(header, json_path, bars), compiled, pythons)


def run_groups(bench: Bench, groups: Collection[str], runs: Mapping[str, Callable[[], object]]) -> None:
    """Runs those of `runs` that are asked for, in their own order, and notes how long each took; then
    measures the machine once more. Floors are of the best rates that were seen at either end."""
    for group, run in runs.items():
        if group in groups:
            started = time.perf_counter()
            run()
            bench.results.figure(f"bench.{group}", time.perf_counter() - started, "seconds it took")
            bench.results.save()
    machine, header = bench.machine, bench.results.header
    machine.states.append(measure_state(quick=bool(header["quick"]) and bench.shape.name == "tiny"))
    header.update(ended=machine.states[-1].date, machine=machine.as_dict())
    bench.results.save()
