"""FlexLLM's figures 12, 13 and 16, of the series that `coserve simulate --check` wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, RULE, new_figure, save, style

_GIGA: Final = 1e9
_PARTS: Final = (
    ("weights", RULE),
    ("gradients, optimizer", OUTPUT),
    ("activations", BOUND),
)  # as rows have them


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws figure 12 above the others, by the file's ending; folders that are missing are made. A quick run
    has no figure 13."""
    series = results["series"]
    begin = "flexllm.fig12["
    models = {name[len(begin) : -1]: rows for name, rows in series.items() if name.startswith(begin)}
    with style():
        figure = new_figure(12.4, 6.2)
        above, below = figure.subfigures(2, 1)
        for axes, (name, rows) in zip(_panels(above, len(models)), models.items(), strict=True):
            _draw_kept(axes, name, rows)
        *left, right = _panels(below, 1 + ("flexllm.fig13" in series))
        for axes in left:
            _draw_memory(axes, series["flexllm.fig13"])
        _draw_case(right, series["flexllm.fig16"])
        save(figure, path)


def _panels(figure: Any, count: int) -> list[Any]:
    return [*figure.subplots(1, count, squeeze=False)[0]]


def _draw_kept(axes: Any, name: str, rows: Sequence[Sequence[float]]) -> None:
    answered, ours, apart = zip(*rows, strict=True)
    axes.plot(answered, ours, "o-", color=OUTPUT, label="co-serving")
    axes.plot(answered, apart, "o-", color=MUTED, label="separate devices")
    axes.set(xlabel="answered tokens a second", ylabel="trained tokens a second", ylim=(0, None))
    axes.set_title(f"{name} (figure 12)", fontsize=8)
    axes.legend()


def _draw_memory(axes: Any, rows: Sequence[Sequence[Any]]) -> None:
    labels = [f"{name}, {'coserve' if system == 'coserve' else 'plain torch'}" for name, system, *_ in rows]
    floors = [0.0] * len(rows)
    for number, (part, color) in enumerate(_PARTS, 2):
        sizes = [row[number] / _GIGA for row in rows]
        axes.barh(labels, sizes, left=floors, color=color, label=part)
        floors = [floor + size for floor, size in zip(floors, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="GB, one example of 1,024 tokens")
    axes.set_title("memory of fine-tuning, estimated (figure 13)", fontsize=8)
    axes.legend()


def _draw_case(axes: Any, rows: Sequence[Sequence[float]]) -> None:
    at, answered, trained, used = zip(*rows, strict=True)
    axes.plot(at, answered, color=OUTPUT, label="tokens of requests a second")
    axes.plot(at, trained, color=BOUND, label="trained tokens a second")
    axes.set(xlabel="seconds", ylim=(0, None))
    share = axes.twinx()
    share.plot(at, [100 * one for one in used], "--", color=MUTED, label="arithmetic used, %")
    share.set(ylim=(0, 100), ylabel="%")
    share.grid(False)
    lines = [*axes.lines, *share.lines]
    axes.legend(lines, [line.get_label() for line in lines])
    axes.set_title("requests that come and go (figure 16)", fontsize=8)
