"""Section `ablation`: bytes saved by each of FlexLLM's memory optimizations (8.2, figure 14), step by
step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from coserve.train.pruning.plan import explain_model
from coserve.train.save_policy import SavePolicy
from coserve_benchmarks.memory.activations import WINDOW, held_bytes, held_tokens, training_engine
from coserve_benchmarks.memory.peers import OURS, peer_of
from coserve_benchmarks.ours import Bench

FULL: Final = "all weights train"
PEER: Final = "nothing"
PRUNED: Final = "pruning"
COMPUTED: Final = "+ rematerialization"
WINDOWS: Final = "+ token windows"
STEPS: Final = (FULL, PEER, PRUNED, COMPUTED, WINDOWS)


def run(bench: Bench) -> None:
    """Measures bytes of each method: `held` between the passes, and of the graph of one `layer` while it goes
    back.

    The first step is counted in the traced layer, as torch would keep it; the second is measured of the
    peer. Pruning alone is the set to keep, before step 2 of the algorithm. The last two are what coserve
    stores: all products but the dear ones made again; then all of them, in windows, with what keys and values
    are owed.
    """
    found = {method: _steps(bench, method) for method in OURS}
    settings = bench.settings
    bench.results.section(
        "ablation",
        {"tokens": settings.held_batch * settings.held_length, "window": WINDOW, "methods": found},
    )


def _steps(bench: Bench, method: str) -> dict[str, dict[str, float]]:
    rows = bench.settings.held_batch * bench.settings.held_length
    explained = explain_model(bench.shape.config, torch.bfloat16, [OURS[method]])
    whole, pruned = (
        sum(len(e.layers) * nbytes for e, nbytes in zip(explained, of, strict=True))
        for of in ([e.autograd for e in explained], [e.pruned for e in explained])
    )
    layer = max(e.pruned for e in explained)
    peer = peer_of(method, bench.shape, held_tokens(bench)).saved_bytes()[0]
    held = held_bytes(training_engine(bench, method, SavePolicy.PRUNED))
    lean = held_bytes(training_engine(bench, method, SavePolicy.INPUTS, WINDOW))
    return {
        FULL: {"held": whole * rows, "layer": 0.0},
        PEER: {"held": peer, "layer": 0.0},
        PRUNED: {"held": pruned * rows, "layer": 0.0},
        COMPUTED: {"held": held.border, "layer": layer * rows},
        WINDOWS: {"held": lean.peak, "layer": layer * min(rows, WINDOW)},
    }


def draw_ablation(results: Mapping[str, Any], path: str | Path) -> None:
    """The section as a picture, by the file's ending; folders that are missing are made. Needs matplotlib."""
    from coserve_benchmarks.drawing import MUTED, OUTPUT, new_figure, save, style

    section = results["ablation"]
    with style():
        figure = new_figure(7.2, 3.2)
        grid = figure.subplots(1, len(section["methods"]), sharey=True)
        for axes, (method, steps) in zip(grid, section["methods"].items(), strict=True):
            names = [step for step in STEPS if step in steps]
            base = steps[PEER]["held"]
            held = [steps[name]["held"] / base for name in names]
            layer = [steps[name]["layer"] / base for name in names]
            axes.bar(range(len(names)), held, color=OUTPUT, width=0.7, label="held")
            axes.bar(
                range(len(names)), layer, bottom=held, color=MUTED, width=0.7, label="a layer going back"
            )
            for place, share in enumerate(held):
                axes.annotate(
                    f"{share:.2f}", (place, share + layer[place]), ha="center", va="bottom", fontsize=8
                )
            axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
            axes.set(title=method)
            axes.grid(visible=False, axis="x")
        grid[0].set_ylabel("of what the peer holds")
        grid[-1].legend(loc="upper right", fontsize=8)
        save(figure, path)
