"""Tokens a second over the share of a base's blocks that stays in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, new_figure, save, style

_LINES: Final = {
    "both": ("both in shared passes", BOUND),
    "training": ("training alone", MUTED),
    "answers": ("answers alone", OUTPUT),
}


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
