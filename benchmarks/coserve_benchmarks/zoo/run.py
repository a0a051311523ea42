"""`coserve bench zoo`: the whole table."""

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from transformers.utils import logging

from coserve.workload.shapes import shape_named
from coserve.zoo.figures import blocks_of, labels_of, storage
from coserve.zoo.partition import THRESHOLD, distinct
from coserve.zoo.picture import draw_chains
from coserve.zoo.store import Zoo
from coserve.zoo.views import serve_from
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.zoo.adaptive import measure_adaptive
from coserve_benchmarks.zoo.alternatives import measure_alternatives
from coserve_benchmarks.zoo.applications import (
    FOUNDATION,
    LARGE,
    SERVED,
    make_applications,
    make_large_applications,
)
from coserve_benchmarks.zoo.loaded import measure_memory, measure_switch
from coserve_benchmarks.zoo.serving import measure_serving

GROUPS: Final = ("storage", "memory", "switch", "serving", "large", "adaptive", "alternatives")
_SERVING: Final[dict[str, Bar]] = {
    "throughput": Bar(1.71),
    "p95": Bar(0.665, at_most=True),
    "vs_parameter_sharing": Bar(1.46),
}
BARS: Final[dict[str, Bar | None]] = {
    "storage.exact": Bar(0.45, at_most=True),
    "storage.with_alternatives": Bar(0.25, at_most=True),
    "memory.vs_models": Bar(0.45, at_most=True),
    "switch.vs_model": Bar(0.165, at_most=True),
    **{f"{own}.{key}": bar for own in ("serving", "large") for key, bar in _SERVING.items()},
    "speculation.right": None,
}


def run_zoo(
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
    picture: Path | None = None,
    depths: Path | None = None,
    loads: Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Chains are drawn
    to `picture`, alternatives by depth to `depths`, adapted answers by load to `loads`. Raises ConfigError
    for an unknown group."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin("tiny", quick, groups, GROUPS, json_path, BARS)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="coserve-zoo-") as name:
        folder = Path(name)
        runs: dict[str, Callable[[], object]] = {
            "adaptive": lambda: measure_adaptive(bench.results, folder, quick, loads),
            "alternatives": lambda: measure_alternatives(bench.results, folder, quick, depths),
            "large": lambda: _large(bench, folder / "large", quick),
        }
        if set(groups) - set(runs):
            zoo = Zoo.create(folder / "zoo")
            make_applications(zoo, folder, quick)
            served = serve_from(zoo, FOUNDATION)
            runs |= {
                "storage": lambda: _storage(bench, zoo),
                "memory": lambda: measure_memory(bench.results, zoo, served),
                "switch": lambda: measure_switch(bench.results, zoo, served, quick),
                "serving": lambda: measure_serving(bench.results, zoo, served, SERVED, quick),
            }
            if picture is not None:
                applications = zoo.applications()
                draw_chains(blocks_of(zoo, applications), labels_of(applications), picture, THRESHOLD)
        run_groups(bench, groups, runs)
    return bench.results.as_dict()


def _large(bench: Bench, folder: Path, quick: bool) -> None:
    """The load of `serving` for twelve applications of a model whose weights take longer to read than all
    calls of a step: 255M parameters."""
    folder.mkdir()
    zoo = Zoo.create(folder / "zoo")
    make_large_applications(zoo, folder, shape_named("19m" if quick else "255m"))
    measure_serving(bench.results, zoo, serve_from(zoo, LARGE), SERVED, quick, "large")


def _storage(bench: Bench, zoo: Zoo) -> None:
    """Bytes of the zoo over those of twenty folders that each have a whole model. The foundation is none of
    the twenty, and counts in the zoo."""
    applications = zoo.applications()
    everything = storage(zoo, applications)
    alone = storage(zoo, {FOUNDATION: applications[FOUNDATION]})
    separate = everything.separate - alone.separate
    results = bench.results
    results.figure("storage.separate", separate, "bytes")
    results.figure("storage.zoo", everything.exact, "bytes")
    blocks = distinct(blocks_of(zoo, applications))
    results.figure("storage.blocks", len(blocks), f"blocks in {len(applications)} chains")
    results.row("storage.exact", everything.exact / separate, note=f"{len(applications) - 1} applications")
    results.row(
        "storage.with_alternatives",
        everything.with_alternatives / separate,
        note="without what full fine-tunes have that is equivalent to a part of the foundation; the zoo "
        "itself keeps it",
    )
