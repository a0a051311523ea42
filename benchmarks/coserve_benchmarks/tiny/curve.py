"""Draw the loss curve of the shipped weights: ``python -m coserve_benchmarks.tiny.curve``."""

import argparse
import json
from pathlib import Path
from typing import Final

import matplotlib

from coserve.tiny import WEIGHTS

OUT: Final = Path("docs/results/tiny-loss.svg")


def draw(log: list[dict[str, float]], out: Path) -> None:
    """Training and held-out loss over the tokens read, as an SVG that is the same for the same log."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "coserve-tiny"
    from matplotlib import pyplot  # only after the backend is chosen

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    held_out = [row for row in log if "held_out_loss" in row]
    axes.plot([r["tokens"] / 1e6 for r in log], [r["loss"] for r in log], label="training, weighted", lw=1)
    axes.plot(
        [r["tokens"] / 1e6 for r in held_out],
        [r["held_out_loss"] for r in held_out],
        label="held-out answers",
        lw=1.6,
    )
    axes.set(yscale="log", xlabel="million tokens", ylabel="loss (nats per token)", title="coserve-tiny")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Read ``loss.json`` beside the weights and write the picture."""
    parser = argparse.ArgumentParser(description="Draw the loss curve of coserve-tiny.")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    draw(json.loads((WEIGHTS / "loss.json").read_text())["log"], options.out)


if __name__ == "__main__":
    main()
