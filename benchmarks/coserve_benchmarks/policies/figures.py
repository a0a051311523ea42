"""Charts put together into figures, and the one picture that the documentation shows. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from coserve_benchmarks.drawing import new_figure, save, style
from coserve_benchmarks.policies import charts
from coserve_benchmarks.policies.charts import Inks, Run
from coserve_benchmarks.policies.ink import inks

OURS: Final = "adaptive"
_PANELS: Final = 2  # bounds that get a panel of their own
_ACROSS: Final = 4  # panels of the picture beside each other


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep: the quantity varied, the value shown, and the paper's figure that it repeats."""

    key: str
    along: str
    value: str
    title: str
    across: str
    up: str
    paper: str


SWEEPS: Final = (
    Sweep(
        "deferral",
        "bound",
        "training",
        "Fine-tuning against the deferral bound",
        "deferral bound (s)",
        "fine-tuning tokens/s",
        "FineInfer, figure 4",
    ),
    Sweep(
        "batch",
        "batch",
        "latency",
        "Latency against the fine-tuning batch",
        "examples in a batch",
        "mean latency (s)",
        "multi-LoRA report, figure 5.2",
    ),
    Sweep(
        "load",
        "rate",
        "training",
        "Fine-tuning against the load",
        "requests a second",
        "fine-tuning tokens/s",
        "FlexLLM, figures 12 and 15",
    ),
    Sweep(
        "instead",
        "rate",
        "training",
        "What a user would do instead",
        "requests a second",
        "fine-tuning tokens/s",
        "two processes on the same cores, and one that stops serving to train",
    ),
)


def ours_of(results: Mapping[str, Any]) -> str:
    """Name of our contestant: as the results say, else the default."""
    return str(results.get("ours", OURS))


def workloads_of(results: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Workloads by name; empty where none was run."""
    return results.get("workloads") or {}


def runs_of(workload: Mapping[str, Any]) -> Mapping[str, Run]:
    """Runs by contestant; empty where there are none."""
    return workload.get("runs") or {}


def bounds_of(runs: Mapping[str, Run]) -> list[str]:
    """Labels of all bounds that anybody was judged by."""
    return list(dict.fromkeys(label for run in runs.values() for label in run.get("attainment") or {}))


def inks_of(results: Mapping[str, Any]) -> Inks:
    """An ink for every contestant in the results."""
    names = [name for workload in workloads_of(results).values() for name in runs_of(workload)]
    names += [point["policy"] for sweep in (results.get("sweeps") or {}).values() for point in sweep]
    return inks(names, ours_of(results))


def outcome(workload: Mapping[str, Any], inks: Inks) -> Any | None:
    """Latencies, and who trains most within each of the first bounds; None where there is nothing to show."""
    runs = runs_of(workload)
    bounds = bounds_of(runs)[:_PANELS]
    has_latencies = any(run.get("latencies") for run in runs.values())
    if not has_latencies and not bounds:
        return None
    panels = has_latencies + len(bounds)
    figure = new_figure(4.9 * max(2, panels), 4.6)
    grid = list(figure.subplots(1, panels, squeeze=False)[0])
    if has_latencies:
        charts.latencies(grid[0], workload, inks)
    for axes, bound in zip(grid[has_latencies:], bounds, strict=True):
        charts.trade(axes, workload, bound, inks)
    charts.legend_of(figure, grid, columns=3 * max(2, panels))
    return figure


def over_time(workload: Mapping[str, Any], name: str, inks: Inks) -> Any | None:
    """Arrivals and both throughputs of one contestant over time; None where they were not written down."""
    run = runs_of(workload).get(name, {})
    if not run.get("flow"):
        return None
    figure = new_figure(10.0, 3.9)
    charts.flow(figure.subplots(3, 1, sharex=True), run, inks[name])
    return figure


def sweeps(results: Mapping[str, Any], inks: Inks) -> Any | None:
    """Every sweep that was run, beside each other."""
    found = _swept(results)
    if not found:
        return None
    figure = new_figure(4.7 * max(2, len(found)), 4.2)
    grid = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (sweep, points) in zip(grid, found, strict=True):
        _sweep(axes, sweep, points, inks)
    charts.legend_of(figure, list(grid))
    return figure


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """The picture of a run, as SVG or PNG by `path`'s ending: who trains most within the first bound of each
    workload, then the sweeps."""
    found = inks_of(results)
    traded = [
        (workload, bound)
        for workload in workloads_of(results).values()
        for bound in bounds_of(runs_of(workload))[:1]
    ]
    swept = _swept(results)
    count = max(1, len(traded) + len(swept))
    across = min(_ACROSS, count)
    down = -(-count // across)
    with style():
        figure = new_figure(3.5 * across, 2.5 * down + 0.5)
        grid = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, (workload, bound) in zip(grid, traded, strict=False):
            charts.trade(axes, workload, bound, found)
            axes.set_title(fill(_short(str(workload.get("title", ""))), 34))
            axes.set_xlabel(f"requests within {bound}")
        for axes, (sweep, points) in zip(grid[len(traded) :], swept, strict=False):
            _sweep(axes, sweep, points, found)
            axes.set_title(fill(sweep.title, 34))
        for axes in grid[len(traded) + len(swept) :]:
            axes.set_axis_off()
        charts.legend_of(figure, grid, families=found)
        save(figure, path)


def _swept(results: Mapping[str, Any]) -> list[tuple[Sweep, Sequence[Mapping[str, Any]]]]:
    there = results.get("sweeps") or {}
    return [(sweep, there[sweep.key]) for sweep in SWEEPS if there.get(sweep.key)]


def _sweep(axes: Any, sweep: Sweep, points: Sequence[Mapping[str, Any]], inks: Inks) -> None:
    charts.sweep(axes, points, sweep.along, sweep.value, inks)
    axes.set(title=sweep.title, xlabel=sweep.across, ylabel=sweep.up)


def _short(title: str) -> str:
    """The part of a long title before its colon, for small panels."""
    return title if len(title) <= 44 else title.split(":")[0]
