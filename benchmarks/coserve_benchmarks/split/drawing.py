"""The paper's figures 10 to 12 and its table 5, of the series and figures that the bench wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, new_figure, save, style

_CONTESTANTS: Final = {
    "split": ("clients of one base", OUTPUT),
    "separate": ("a base in each process", MUTED),
}
_PANELS: Final = (
    ("memory", "memory, GB (figure 10)", 1e-9),
    ("step", "seconds of a training step (figure 11)", 1.0),
    ("rate", "trained tokens a second (figure 12)", 1.0),
)
_MODES: Final = {"opportunistic": OUTPUT, "lockstep": BOUND, "none": MUTED}


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws four panels by the file's ending; folders that are missing are made. The last one stays empty
    where the group `batching` has not run."""
    series = results["series"]
    with style():
        figure = new_figure(12.4, 3.2)
        *panels, last = figure.subplots(1, len(_PANELS) + 1)
        for axes, (kind, title, unit) in zip(panels, _PANELS, strict=True):
            for name, (label, color) in _CONTESTANTS.items():
                values = [unit * value for value in series[f"clients.{name}.{kind}"]]
                axes.plot(series["clients"], values, "o-", color=color, label=label)
            axes.set(xlabel="training clients", ylim=(0, None))
            axes.set_title(title, fontsize=7)
        panels[0].legend()
        _draw_batching(results["figures"], last)
        save(figure, path)


def _draw_batching(figures: Mapping[str, Any], axes: Any) -> None:
    axes.set_title("seconds a token by batching (table 5)", fontsize=7)
    sizes = set[int]()
    for mode, color in _MODES.items():
        begin = f"batching.{mode}.latency["
        points = sorted(
            (int(name[len(begin) : -1]), one["value"])
            for name, one in figures.items()
            if name.startswith(begin)
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=mode)
            sizes |= {size for size, _ in points}
    if axes.lines:
        axes.set(xlabel="sequences of the client", xscale="log", ylim=(0, None))
        axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
        axes.minorticks_off()
        axes.legend()
