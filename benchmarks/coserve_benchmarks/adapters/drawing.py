"""Figure 5.1 as a picture: throughput over the number of adapters and over the batch. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from coserve_benchmarks.drawing import MUTED, new_figure, save, style

_INKS: Final[Mapping[str, tuple[str, str]]] = {  # in the order of the legend
    "coserve": ("#d1205f", "*"),
    "block-sparse": ("#12856a", "s"),
    "grouped": ("#c85a00", "o"),
    "naive": ("#4b5563", "v"),
}
_AXES: Final = {"adapters": "adapters", "batch": "rows of the batch"}


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """The section `figure` of a run, as SVG or PNG by `path`'s ending; folders that are missing are made."""
    section, machine = results["figure"], results["machine"]
    tasks = list(dict.fromkeys(point["task"] for point in section["points"]))
    extents = section["extents"]
    with style():
        figure = new_figure(8.6, 6.4)
        grid = figure.subplots(2, len(tasks), squeeze=False)
        for column, task in enumerate(tasks):
            for row, sweep in enumerate(_AXES):
                axes = grid[row][column]
                own = [p for p in section["points"] if (p["task"], p["sweep"]) == (task, sweep)]
                _panel(axes, sweep, own)
                fixed = (
                    f"{extents[task]['rows']} rows"
                    if sweep == "adapters"
                    else f"{extents[task]['default']} adapters"
                )
                axes.set_title(f"{task}, {fixed}")
            grid[0][column].set_ylabel("tokens a second")
            grid[1][column].set_ylabel("tokens a second")
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
        lines = (
            f"{results['shape']} in bfloat16; adapters on all seven linears, ranks 16, 32, 64, 128 a quarter "
            "each; each row is one's at random",
            f"rows of {extents['fine-tuning']['length']} tokens in fine-tuning; {machine['cpu']}, "
            f"{machine['threads']} threads, {results['date'][:10]}",
            fill(results["command"], 120),
        )
        figure.supxlabel("\n".join(lines), fontsize=7, color=MUTED)
        save(figure, path)


def _panel(axes: Any, sweep: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Throughput of every approach, with its least and greatest round."""
    for name, (color, marker) in _INKS.items():
        own = sorted((p for p in points if p["approach"] == name), key=lambda p: int(p[sweep]))
        if not own:
            continue
        places, values = [p[sweep] for p in own], [p["tokens_per_s"] for p in own]
        size = 8 if marker == "*" else 4
        axes.plot(places, values, color=color, marker=marker, markersize=size, label=name, linewidth=1.6)
        axes.fill_between(
            places, [p["low"] for p in own], [p["high"] for p in own], color=color, alpha=0.15, linewidth=0
        )
    axes.set_xscale("log", base=2)
    places = sorted({p[sweep] for p in points})
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(_AXES[sweep])
