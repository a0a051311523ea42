"""Tokens a second over the share of a base's blocks that stays in memory, and gains over deferral bounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, new_figure, save, style
from coserve_benchmarks.streamed.deferral import BAR, MACHINES

_LINES: Final = {
    "both": ("both in shared passes", BOUND),
    "training": ("training alone", MUTED),
    "answers": ("answers alone", OUTPUT),
}
_TICKS: Final = (1, 2, 4, 8, 16)


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws the series `share.*` by the file's ending; folders that are missing are made."""
    series = results["series"]
    with style():
        figure = new_figure(5.6, 3.2)
        axes = figure.subplots()
        for kind, (label, color) in _LINES.items():
            axes.plot(series["share.share"], series[f"share.{kind}"], "o-", color=color, label=label)
        axes.set(xlabel="share of the blocks that stays in memory", ylabel="tokens a second", ylim=(0, None))
        axes.legend()
        save(figure, path)


def draw_deferral(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws the series `deferral.*`: algorithm 2 over algorithm 1 by the bound, a line for each load."""
    series = results["series"]
    bounds = series["deferral.bounds"]
    with style():
        figure = new_figure(7.4, 3.4)
        for axes, (name, machine) in zip(figure.subplots(1, len(MACHINES)), MACHINES.items(), strict=True):
            begin, end = f"deferral.{name}.", ".ratio.value"
            loads = sorted(float(key[len(begin) : -len(end)]) for key in series if _is_line(key, begin, end))
            viridis = matplotlib.colormaps["viridis"]
            colors = [viridis(place / (len(loads) + 1)) for place in range(len(loads))]
            for load, color in zip(loads, colors, strict=True):
                values = [value or float("nan") for value in series[f"{begin}{load:.2g}{end}"]]
                axes.plot(bounds, values, "o-", color=color, markersize=3, label=f"{load:g}")
            axes.axhline(BAR, color=BOUND, linewidth=0.8)
            axes.set_title(f"{name}: {machine.title}", fontsize=8)
            axes.set(xlabel="deferral bound, passes", xscale="log")
            axes.set_yscale("log")
            axes.set_xticks(bounds, map(str, bounds))
            axes.set_yticks(_TICKS, map(str, _TICKS))
            axes.minorticks_off()
            axes.legend(title="load")
        figure.supylabel("fine-tuning, algorithm 2 over 1", color=MUTED, fontsize=9)
        save(figure, path)


def _is_line(key: str, begin: str, end: str) -> bool:
    return key.startswith(begin) and key.endswith(end)
