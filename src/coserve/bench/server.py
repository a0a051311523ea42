"""`coserve bench server`: what serving over HTTP costs, and what is left after `kill -9`."""

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coserve.bench import firstbyte, overhead, restart, survival
from coserve.bench.folder import save_shape
from coserve.bench.machine import measure_machine
from coserve.bench.ours import CACHE_TOKENS, Bench
from coserve.bench.results import SERVER_BARS, Results
from coserve.bench.served import Served
from coserve.bench.settings import settings_for
from coserve.bench.shapes import shape_named
from coserve.errors import ConfigError

_ON_ONE_SERVER: Mapping[str, Callable[[Bench, Served], None]] = {
    "overhead": overhead.run,
    "latency": firstbyte.run,
    "restart": restart.run,
}
GROUPS = (*_ON_ONE_SERVER, "kills")


def run_server(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Starts `coserve serve` on the shape, measures some groups of rows (all, by default), and returns what
    `--json` writes: the table's keys and, beside them, the sections of `run_engine`'s.

    Everything lies in a temporary folder. `quick` is for trying it out. Raises ConfigError for an unknown
    shape or group, and ServerError where the server does not do what it should.
    """
    groups = GROUPS if only is None else tuple(only)
    if unknown := set(groups) - set(GROUPS):
        raise ConfigError(f"there is no group {sorted(unknown)} in the bench; there are {', '.join(GROUPS)}")
    chosen, settings = shape_named(shape), settings_for(shape, quick)
    machine = measure_machine(quick=quick and shape == "tiny")
    header = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "shape": shape,
        "parameters": chosen.parameters,
        "quick": quick,
        "groups": list(groups),
        "date": machine.date,
        "machine": machine.as_dict(),
    }
    bench = Bench(chosen, settings, machine, Results(header, json_path, SERVER_BARS))
    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as folder:
        model = save_shape(chosen, Path(folder))
        if set(groups) & set(_ON_ONE_SERVER):
            _on_one_server(bench, model, groups)
        if "kills" in groups:
            _timed(bench, "kills", partial(survival.run, bench, model))
    return bench.results.as_dict()


def _on_one_server(bench: Bench, model: Path, groups: Collection[str]) -> None:
    """Those groups that kill nothing but an idle engine, with the engine settings of the engine's bench."""
    with (
        tempfile.TemporaryDirectory(dir=model.parent) as folder,
        Served(model, Path(folder), engine_cache_tokens=CACHE_TOKENS) as served,
    ):
        served.wait_standby()  # its imports are work too
        for group, run in _ON_ONE_SERVER.items():
            if group in groups:
                _timed(bench, group, partial(run, bench, served))


def _timed(bench: Bench, group: str, run: Callable[[], None]) -> None:
    started = time.perf_counter()
    run()
    bench.results.figure(f"bench.{group}", time.perf_counter() - started, "seconds it took")
    bench.results.save()
