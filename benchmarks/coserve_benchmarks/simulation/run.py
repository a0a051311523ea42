"""The table of `coserve simulate --check`."""

import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from coserve.core.request import SLO
from coserve.simulate.loads import SimulatedLoad, TrainingLoad
from coserve.simulate.runs import FleetSettings, Simulator
from coserve.simulate.sweep import figures_of
from coserve.workload.requests import ServedAdapters
from coserve.workload.shapes import shape_named
from coserve_benchmarks.groups import begin, run_groups
from coserve_benchmarks.ours import Bench
from coserve_benchmarks.results import Bar
from coserve_benchmarks.simulation.growth import growth
from coserve_benchmarks.simulation.papers import (
    blockllm,
    blockllm_cluster,
    fineinfer,
    flexllm,
    report,
    symbiosis,
)
from coserve_benchmarks.simulation.papers.statement import PaperResult, Say
from coserve_benchmarks.simulation.real import RealRuns
from coserve_benchmarks.simulation.section import SECTION

PAPERS: Final[dict[str, Callable[[bool, Say], PaperResult]]] = {
    "flexllm": flexllm.run,
    "fineinfer": fineinfer.run,
    "report": report.run,
    "blockllm": blockllm.run,
    "cluster": blockllm_cluster.run,
    "symbiosis": symbiosis.run,
}
GROUPS: Final = (*PAPERS, "published", "scale", "errors")
BARS: Final[dict[str, Bar | None]] = {
    "error.time_per_token": Bar(0.05, at_most=True),
    "error.ttft_p99": Bar(0.15, at_most=True),
    "error.training": Bar(0.05, at_most=True),
    "error.published": None,
    "flexllm.kept": Bar(0.80),
    "flexllm.attainment": Bar(0.99),
    "blockllm.foundation_p95": Bar(0.75, at_most=True),
    "blockllm.foundation_throughput": Bar(1.5),
    "cluster.dispatch.vs_least_busy": Bar(0.9, at_most=True),
    "cluster.dispatch.vs_recompute_only": Bar(0.8, at_most=True),
    "cluster.vs_per_model.throughput": Bar(1.71),
    "cluster.vs_per_model.p95": Bar(0.665, at_most=True),
    "cluster.vs_parameter_sharing": Bar(1.46),
    "cluster.locality.transfer_bytes": Bar(0.7, at_most=True),
    "cluster.scaling": Bar(1.3),
    "cluster.speculation.p50": Bar(0.95, at_most=True),
    "cluster.kv.meet.vs_best_of_both": Bar(0.75, at_most=True),
    "events_per_second": None,
    "scheduler.growth": Bar(1.0, at_most=True),
}
# Llama-3.1-8B on an H100, 1,024 tokens in and 512 out: (sequences at once, ms a token), by the measured
# kernel tables of aiconfigurator-core 0.12 (Apache-2.0).
PUBLISHED: Final = ((8, 7.42), (32, 9.88), (128, 19.3))
OF_SEEDS: Final = "95 % interval of the mean over seeds"
_A_DAY: Final = 10_000_000  # requests
_FLEET: Final = 1000  # engines
_ADAPTERS: Final = 1_000_000


def run_check(
    shape: str = "19m",
    quick: bool = False,
    only: Collection[str] | None = None,
    json_path: str | Path | None = None,
) -> dict[str, Any]:
    """Measures the rows of some groups (all, by default) and returns what `--json` writes. Raises ConfigError
    for an unknown shape or group."""
    groups = GROUPS if only is None else tuple(only)
    bench = begin(shape, quick, groups, GROUPS, json_path, BARS)
    rows = _SimulationRows(bench, quick)
    papers = {name: partial(rows.paper, name) for name in PAPERS}
    own = {"published": rows.published, "scale": rows.scale, "errors": rows.errors}
    run_groups(bench, groups, {**papers, **own})
    return bench.results.as_dict()


class _SimulationRows:
    """Rows of the table, a method for each group."""

    def __init__(self, bench: Bench, quick: bool) -> None:
        self._bench, self._quick, self._results = bench, quick, bench.results
        self._papers: dict[str, Any] = {}

    def errors(self) -> None:
        """Errors on policies and workloads that the simulator's costs are not from."""
        pairs = RealRuns(self._bench, self._quick, _say).compare()
        self._results.section("pairs", [pair.as_dict() for pair in pairs])
        note = ", ".join(f"{pair.policy} on {pair.workload}" for pair in pairs)
        for name in ("time_per_token", "ttft_p99", "training"):
            errors = [error for pair in pairs if (error := pair.error(name)) is not None]
            self._results.row(
                f"error.{name}", median(errors), note=f"median of {note}; largest {max(errors):.1%}"
            )

    def scale(self) -> None:
        """The scheduler's own time by the length of its line, and the events of a large fleet."""
        waiting = (20, 200) if self._quick else (100, 1000, 10_000)
        seconds, relative = growth(waiting)
        for count, taken in seconds.items():
            self._results.figure(
                f"scheduler.step[{count}]", taken * 1e3, "ms with so many requests that wait"
            )
        said = f"from {waiting[0]} to {waiting[-1]} waiting requests, over that of n log n; policy hybrid"
        self._results.row("scheduler.growth", relative, note=said)
        engines, span = (10, 2.0) if self._quick else (_FLEET, 2.0)
        load = SimulatedLoad(
            span,
            _A_DAY / 86_400 * engines / _FLEET,
            slo=SLO(first_token=2.0, between_tokens=0.1),
            adapters=ServedAdapters(_ADAPTERS if not self._quick else 1000, 16, 1.0),
            training=TrainingLoad(1),
        )
        fleet = FleetSettings(shape_named("8b"), "h100", engines=engines, cache_tokens=1 << 16)
        simulator = Simulator(fleet, load)
        begun = time.perf_counter()
        found = simulator.run(0)
        taken = time.perf_counter() - begun
        said = (
            f"{engines} engines of 8b on an H100 each, {load.rate:.4g} requests/s for {span:g} s "
            f"({load.rate or 0:.4g} x 86,400 a day), {load.adapters.count:,} adapters, a job on each engine: "
            f"{found.events:,} events in {found.steps:,} steps took {taken:.0f} s"
        )
        self._results.row("events_per_second", found.events / taken, note=said)
        self._results.figure("steps_per_second", found.steps / taken, "scheduler steps/s")

    def published(self) -> None:
        """Times per token beside published ones, at as many sequences at once."""
        errors = []
        for at_once, theirs in PUBLISHED:
            rate = at_once / (512 * theirs / 1e3)
            load = SimulatedLoad(
                8.0 if self._quick else 30.0, rate, prompt=1024, answer=512, arrivals="steady"
            )
            found = figures_of(Simulator(FleetSettings(shape_named("8b"), "h100"), load).run(0))
            assert found.time_per_token_mean is not None, "there are answers"
            ours = found.time_per_token_mean * 1e3
            errors.append(abs(ours - theirs) / theirs)
            said = f"ms a token of 8b on h100, {at_once} at once; aiconfigurator-core 0.12 has {theirs:g}"
            self._results.figure(f"published[{at_once}]", ours, said)
        self._results.row("error.published", median(errors), note="of the times per token `published`")

    def paper(self, name: str) -> None:
        """The settings of one paper beside its statements."""
        found = PAPERS[name](self._quick, _say)
        self._papers[name] = found.as_dict()
        self._results.section(SECTION, self._papers)
        for key, values in found.series.items():
            self._results.series(key, values)
        for key, (value, unit) in found.figures.items():
            self._results.figure(key, value, unit)
        for key, row in found.rows.items():
            self._results.row(key, row.value, row.interval, row.note, OF_SEEDS)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
