"""`coserve bench methods`: the whole table."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.methods import curves, mixed, parity
from coserve_benchmarks.methods.menu import METHODS
from coserve_benchmarks.results import Bar

GROUPS: Final = ("parity", "mixed", "trains")
BARS: Final[Mapping[str, Bar | None]] = {
    **{f"parity[{m}].{what}": Bar(1e-5, at_most=True) for m in METHODS for what in ("forward", "gradient")},
    "mixed.vs_same": Bar(0.7),
    **{f"trains[{method}].loss_drop": None for method in METHODS},
}


def run_methods(
    shape: str = "255m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes.

    Parity is measured on models made on the spot, learning on the embedded one; `shape` is that of the mixed
    step. The dictionary is as `coserve_benchmarks.engine.run_engine`'s. Raises ConfigError for an unknown
    shape or group.
    """
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    runs = {
        "parity": partial(parity.run, bench),
        "mixed": partial(mixed.run, bench),
        "trains": partial(curves.run, bench),
    }
    run_groups(bench, groups, runs)
    return bench.results.as_dict()
