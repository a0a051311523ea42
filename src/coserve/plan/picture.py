"""Draws a plan as stacked bytes, with measured peaks as marks. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Rows = Sequence[Mapping[str, Any]]

TEXT: Final = "#1c2128"
MUTED: Final = "#69717c"
STYLE: Final = {
    "svg.fonttype": "none",  # letters, not their outlines: a tenth of the bytes
    "svg.hashsalt": "coserve",  # the same picture for the same data
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7ec",
    "legend.frameon": False,
}

# From the bottom up, as the multi-LoRA report's figure 4.1 has them; what it does not have comes after that.
_STACKED: Final[Mapping[str, tuple[str, str]]] = {
    "weights": ("weights", "#4b5563"),
    "no_grad": ("no-grad overhead", "#38a3dc"),
    "activations": ("activations", "#7a3fc4"),
    "backward": ("backward", "#d1205f"),
    "cache": ("keys and values", "#12856a"),
    "optimizer": ("optimizer", "#c85a00"),
}
_MB: Final = 1e6
_ACROSS: Final = 4  # panels beside each other


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """The picture of a plan, as SVG or PNG by `path`'s ending: over batches where there are several of them,
    else one bar for each row."""
    rows: Rows = results["rows"]
    with matplotlib.rc_context(STYLE):
        several = len({row["batch"] for row in rows}) > 1
        figure = _over_batches(rows) if several else _bars(rows)
        figure.suptitle(
            f"{results['model']}, {results['dtype']}, {results['length']} tokens a sequence",
            fontsize=10,
            color=MUTED,
        )
        metadata = {"Date": None} if Path(path).suffix == ".svg" else {}
        figure.savefig(path, facecolor="white", dpi=80, metadata=metadata)


def _bars(rows: Rows) -> Any:
    figure = Figure(figsize=(9.0, 1.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    left = [0.0] * len(rows)
    for key, (label, color) in _STACKED.items():
        widths = [row[key] / _MB for row in rows]
        axes.barh(places, widths, left=left, color=color, label=label, height=0.72, linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    found = [(place, row) for place, row in zip(places, rows, strict=True) if row["measured"]]
    if found:
        totals = [max(row["measured"].values()) / _MB for _, row in found]
        axes.plot(totals, [p for p, _ in found], "D", color=TEXT, markersize=4, label="measured")
    axes.set_yticks(list(places), [f"{row['name']} ({row['system']})" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("MB")
    figure.legend(loc="outside lower center", ncols=len(_STACKED) + 1)
    return figure


def _over_batches(rows: Rows) -> Any:
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["system"], row["name"]), []).append(row)
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(3.4 * across, 3.0 * down + 0.6), layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for axes, ((system, name), own) in zip(grid, panels.items(), strict=False):
        _panel(axes, sorted(own, key=lambda row: int(row["batch"])))
        axes.set_title(f"{name.partition(':')[0]} ({system})")
        axes.set_xlabel("batch")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    tops = [max([row["total"], *(row["measured"] or {}).values()]) for row in rows]
    grid[0].set_ylim(0, 1.04 * max(tops) / _MB)
    grid[0].set_ylabel("MB")
    handles, names = grid[0].get_legend_handles_labels()
    if any(row["measured"] for row in rows):
        handles.append(Line2D([], [], marker="D", color=TEXT, markersize=4, linestyle="none"))
        names.append("measured (dots: stages)")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return figure


def _panel(axes: Any, rows: Rows) -> None:
    """Bytes over the batch, and the peaks of all stages that were measured."""
    batches = [row["batch"] for row in rows]
    stacks = [[row[key] / _MB for row in rows] for key in _STACKED]
    colors = [color for _, color in _STACKED.values()]
    axes.stackplot(
        batches, stacks, colors=colors, labels=[label for label, _ in _STACKED.values()], linewidth=0
    )
    for row in rows:
        peaks = [peak / _MB for peak in (row["measured"] or {}).values()]
        # By plain torch each stage is a border between two parts; the engine holds its cache from the start.
        stages = peaks[:-1] if row["system"] == "torch" else []
        axes.plot([row["batch"]] * len(stages), stages, "o", color=TEXT, markersize=2.5, zorder=6)
        axes.plot([row["batch"]] * len(peaks[-1:]), peaks[-1:], "D", color=TEXT, markersize=4, zorder=6)
    axes.set_xticks(batches)
    axes.set_xlim(min(batches), max(batches))
    axes.set_axisbelow(False)
