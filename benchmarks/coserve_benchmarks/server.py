"""`coserve bench server`: the cost of serving over HTTP, live answers beside a batch, pages
that watch, and recovery from a killed engine."""

import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coserve_benchmarks import batches, firstbyte, overhead, restart, viewers
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import CACHE_TOKENS, Bench
from coserve_benchmarks.results import SERVER_BARS
from coserve_benchmarks.served import Served

_RUNS: Mapping[str, Callable[[Bench, Served], None]] = {
    "overhead": overhead.run,
    "latency": firstbyte.run,
    "batches": batches.run,
    "viewers": viewers.run,
    "restart": restart.run,
}
GROUPS = tuple(_RUNS)


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
    bench = begin(shape, quick, groups, GROUPS, json_path, SERVER_BARS)
    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as folder:
        model = save_shape(bench.shape, Path(folder))
        with Served(
            model, Path(folder), engine_cache_tokens=CACHE_TOKENS, engine_prefix_sharing=False
        ) as served:
            served.wait_standby()  # its imports are work too
            run_groups(bench, groups, {group: partial(run, bench, served) for group, run in _RUNS.items()})
    return bench.results.as_dict()
