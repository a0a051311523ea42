"""The charts of a run, each on axes that it is given. Needs matplotlib.

The same ones stand in the page and in the picture for the documentation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT
from coserve_benchmarks.policies.ink import Ink

Run = Mapping[str, Any]
Inks = Mapping[str, Ink]

GOOD: Final = 0.99  # of the requests within their bounds
_POINTS: Final = 160  # of a curve at most
_PAPER: Final = "white"
_BINS: Final = 75  # of what is shown over time at most
_WIDE_RANGE: Final = 12.0  # between the least and the greatest latency, from which on the axis is logarithmic


def latencies(axes: Any, workload: Mapping[str, Any], inks: Inks) -> None:
    """Draws, for each contestant, the share of all requests answered within x seconds; bounds are vertical
    lines.

    A contestant with unanswered requests does not reach 100%.
    """
    axes.set(title="Latency: share of requests answered within", xlabel="seconds", ylabel="requests")
    runs = {name: run["latencies"] for name, run in workload["runs"].items() if run.get("latencies")}
    for name, found in runs.items():
        asked = max(len(found), int(workload["runs"][name].get("requests", 0)))
        _cumulative(axes, sorted(found), asked, name, inks[name])
    for label, bound in (workload.get("latency_bounds") or {}).items():
        axes.axvline(bound, color=BOUND, linewidth=1.0, linestyle=(0, (4, 2)), zorder=2)
        axes.annotate(
            label,
            (bound, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            color=BOUND,
            fontsize=8,
            rotation=90,
            va="bottom",
            bbox={"facecolor": _PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.0},
            zorder=7,
        )
    every = [latency for found in runs.values() for latency in found if latency > 0]
    if every and max(every) / min(every) > _WIDE_RANGE:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def trade(axes: Any, workload: Mapping[str, Any], bound: str, inks: Inks) -> None:
    """Each contestant's fine-tuning tokens a second against how many requests were within a bound: up and to
    the right is better. The legend has its name."""
    axes.set(title=f"Fine-tuning against attainment: {bound}")
    axes.set(xlabel="requests within the bound", ylabel="fine-tuning tokens/s")
    points = {
        name: (run["attainment"][bound], run["training"])
        for name, run in workload["runs"].items()
        if bound in (run.get("attainment") or {}) and run.get("training") is not None
    }
    for name, (share, rate) in points.items():
        ink = inks[name]
        size = 170 if ink.marker == "*" else 44
        mark = {"s": size, "color": ink.color, "marker": ink.marker, "zorder": ink.order}
        axes.scatter([share], [rate], label=name, **mark)
    least = min((share for share, _ in points.values()), default=0.0)
    room = max(0.02, 0.12 * (1.0 - least))  # nobody is above 100%, but a mark needs room there
    axes.set_xlim(max(-0.06, least - room), 1.0 + room)
    axes.set_ylim(0.0, 1.14 * max([1.0, *(rate for _, rate in points.values())]))
    axes.axvline(GOOD, color=BOUND, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    axes.set_xticks([tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick < 1.001])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(_whole())


def flow(panels: Sequence[Any], run: Run, ink: Ink) -> None:
    """Arrivals, output and fine-tuning tokens a second over time, one above the other."""
    points = _binned(run["flow"])
    seconds = [point[0] for point in points]
    rows = ((3, "arrivals/s", MUTED), (1, "output tokens/s", OUTPUT), (2, "fine-tuning tokens/s", ink.color))
    for axes, (column, said, color) in zip(panels, rows, strict=True):
        values = [point[column] for point in points]
        axes.fill_between(seconds, values, step="post", color=color, alpha=0.22, linewidth=0)
        axes.step(seconds, values, where="post", color=color, linewidth=1.5)
        axes.set_title(said, fontsize=9, fontweight="normal", color=color)
        axes.set_ylim(0.0, max(1e-9, *values) * 1.12)
        axes.set_xlim(seconds[0], seconds[-1])
        axes.yaxis.set_major_formatter(_whole())
        axes.margins(x=0)
    panels[-1].set_xlabel("seconds")


def sweep(axes: Any, points: Sequence[Mapping[str, Any]], along: str, value: str, inks: Inks) -> None:
    """One line for each policy. Where a point knows that fewer than 99% of the requests were within their
    bounds, it is hollow."""
    known = [point for point in points if point.get(value) is not None]
    for name in dict.fromkeys(point["policy"] for point in known):
        ink = inks[name]
        own = sorted((point for point in known if point["policy"] == name), key=lambda point: point[along])
        across, up = [point[along] for point in own], [point[value] for point in own]
        axes.plot(across, up, color=ink.color, linestyle=ink.dash, linewidth=ink.width, zorder=ink.order)
        kept = [point.get("attainment") is None or point["attainment"] >= GOOD for point in own]
        marked = [ink.color if keeps else _PAPER for keeps in kept]
        size = 90 if ink.marker == "*" else 26
        axes.scatter(
            across, up, s=size, c=marked, edgecolors=ink.color, marker=ink.marker, linewidths=1.2, zorder=8
        )
        axes.plot(
            [], [], color=ink.color, linestyle=ink.dash, linewidth=ink.width, marker=ink.marker, label=name
        )
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.yaxis.set_major_formatter(_whole())


def legend_of(figure: Any, grid: Sequence[Any], columns: int = 7, families: Inks | None = None) -> None:
    """One legend below axes that partly show the same contestants, or with their inks, families of these."""
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name if families is None else families[name].family, handle)
    if handles:
        columns = min(columns, len(handles))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def _cumulative(axes: Any, ordered: Sequence[float], asked: int, name: str, ink: Ink) -> None:
    steps = max(1, len(ordered) // _POINTS)
    kept = sorted({*range(0, len(ordered), steps), len(ordered) - 1})
    across = [ordered[0], *(ordered[i] for i in kept)]
    up = [0.0, *((i + 1) / asked for i in kept)]
    axes.step(
        across,
        up,
        where="post",
        color=ink.color,
        linestyle=ink.dash,
        linewidth=ink.width,
        zorder=ink.order,
        label=name,
    )


def _binned(points: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Means over so many seconds that the eye can follow; the first column is where each bin begins."""
    wide = -(-len(points) // _BINS)
    bins = [points[i : i + wide] for i in range(0, len(points), wide)]
    means = [
        (part[0][0], *(sum(column) / len(part) for column in list(zip(*part, strict=True))[1:]))
        for part in bins
    ]
    return [*means, (points[-1][0] + 1.0, *means[-1][1:])]  # so that the last one has its width


def _whole() -> Any:
    return FuncFormatter(
        lambda value, _: f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.2g}"
    )
