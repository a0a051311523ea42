"""Learning curves of GRPO and DPO on the embedded model, of the series that the group `curves` wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, new_figure, save, style

_WAYS: Final = {
    "together": ("sampling and training in the same steps", OUTPUT),
    "turns": ("sampling, then training", MUTED),
}


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws a panel for GRPO and two for DPO by the file's ending; folders that are missing are made. The
    last two stay empty in results without DPO's series."""
    series = results["series"]
    with style():
        figure = new_figure(12.4, 3.2)
        rewards, margins, accuracies = figure.subplots(1, 3)
        for name, (label, color) in _WAYS.items():
            _plot(rewards, series.get(f"rl.reward.{name}", ()), color, label)
        _title(rewards, "GRPO: mean reward of a step's answers", "optimizer step")
        _plot(margins, series.get("dpo.margins", ()), OUTPUT, "rewards/margins")
        _plot(margins, series.get("dpo.loss", ()), BOUND, "loss")
        _title(margins, "DPO: margin of the implicit rewards, and loss", "optimizer step")
        _plot(accuracies, series.get("dpo.accuracies", ()), OUTPUT, "rewards/accuracies")
        accuracies.set(ylim=(0, 1.05))
        _title(accuracies, "DPO: share of pairs whose preferred answer is ahead", "optimizer step")
        save(figure, path)


def _plot(axes: Any, values: Sequence[float], color: str, label: str) -> None:
    if values:
        axes.plot(range(1, len(values) + 1), values, color=color, label=label)


def _title(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize=7)
    if axes.lines:
        axes.set(xlabel=below)
        axes.legend()
