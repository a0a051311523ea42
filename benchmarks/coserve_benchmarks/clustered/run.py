"""Groups of `coserve bench cluster`: what two cores can show is measured, the rest modelled."""

import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.clustered import failover, meeting, speculation
from coserve_benchmarks.folder import save_shape
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.simulation.papers import blockllm_cluster
from coserve_benchmarks.simulation.run import BARS as SIMULATED
from coserve_benchmarks.simulation.run import OF_SEEDS

_MODELLED: Final = "modelled."
_SIMULATED: Final = "cluster."  # what the simulator's check calls these rows
_MEASURED: Final[Mapping[str, Callable[[Bench, Path], None]]] = {
    "kv": meeting.run, "failover": failover.run, "speculation": speculation.run,
}  # fmt: skip
GROUPS: Final = (*_MEASURED, "modelled")
BARS: Final[dict[str, Bar | None]] = {
    "kv.meet.vs_best_of_both": Bar(0.75, at_most=True),
    "failover.changed": Bar(0, at_most=True),
    "failover.gap_s": None,
    "speculation.p50": Bar(0.95, at_most=True),
    "speculation.wrong_p50": None,
    **{
        f"{_MODELLED}{name.removeprefix(_SIMULATED)}": bar
        for name, bar in SIMULATED.items()
        if name.startswith(_SIMULATED)
    },
}


def run_cluster(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures some groups (all, by default), and returns what `--json` writes. Raises ConfigError for an
    unknown shape or group, and ServerError where workers do not do what they should."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as folder:
        model = save_shape(bench.shape, Path(folder)) if set(groups) & set(_MEASURED) else Path()
        measured = {name: partial(run, bench, model) for name, run in _MEASURED.items()}
        run_groups(bench, groups, {**measured, "modelled": partial(_model, bench)})
    return bench.results.as_dict()


def _model(bench: Bench) -> None:
    """The rows of the simulator's cluster, by its own names, and the series of its figures."""
    found = blockllm_cluster.run(bool(bench.results.header["quick"]), lambda _: None)
    for name, row in found.rows.items():
        bench.results.row(
            f"{_MODELLED}{name.removeprefix(_SIMULATED)}", row.value, row.interval, row.note, OF_SEEDS
        )
    for name, (value, unit) in found.figures.items():
        bench.results.figure(f"{_MODELLED}{name.removeprefix(_SIMULATED)}", value, unit)
    for name, values in found.series.items():
        bench.results.series(name, values)
