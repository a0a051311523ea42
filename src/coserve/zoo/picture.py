"""Draws chains with shared blocks in one colour, heat maps of similarities, and accuracies of alternatives by
depth. Needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from coserve.zoo.partition import ChainBlock

_TEXT: Final = "#1c2128"
_MUTED: Final = "#69717c"
_OWN: Final = "#e4e7ec"  # of blocks that one application has
_SHARED: Final = (
    "#38a3dc", "#7a3fc4", "#12856a", "#c85a00", "#d1205f", "#4b5563", "#b7950b", "#2e6f9e", "#7d8f2a",
)  # fmt: skip
_STYLE: Final = {
    "svg.fonttype": "none",  # letters, not their outlines
    "svg.hashsalt": "coserve",  # the same picture for the same data
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
}


def draw_chains(
    blocks: Mapping[str, Sequence[ChainBlock]],
    labels: Mapping[str, Sequence[str]],
    path: Path,
    threshold: float,
) -> None:
    """Draws each application's chain as a row of blocks, as SVG or PNG by `path`'s ending. Blocks in several
    chains have one colour, others are grey; a dashed border says that another chain has an equivalent.
    `labels` are short names of the components at each place, by application."""
    colors = _colors(blocks)
    widest = max((own[-1].stop for own in blocks.values() if own), default=1)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2.4 + 0.42 * widest, 0.9 + 0.42 * len(blocks)), layout="constrained")
        axes = figure.subplots()
        for row, (name, own) in enumerate(blocks.items()):
            for block in own:
                _box(axes, block, row, colors.get(block.id, _OWN), title_of(block, labels[name]))
        axes.set_yticks(range(len(blocks)), list(blocks))
        axes.set_ylim(len(blocks) - 0.4, -0.6)
        axes.set_xlim(-0.1, widest + 0.1)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(
            "one colour: one block in several chains; grey: in one; dashed: another chain has one that is "
            f"similar to {threshold:g} or more",
            loc="left", fontsize=8, color=_MUTED,
        )  # fmt: skip
        _save(figure, path)


def draw_similarity(layers: Sequence[Sequence[float]], one: str, other: str, path: Path) -> None:
    """Draws the similarity of each layer of one model with each of the other (figure 3)."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 4.4), layout="constrained")
        axes = figure.subplots()
        drawn = axes.imshow(layers, origin="lower", cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xlabel(f"layer of {other}")
        axes.set_ylabel(f"layer of {one}")
        figure.colorbar(drawn, label="cosine similarity of vocabulary distributions")
        _save(figure, path)


def draw_depths(lines: Mapping[str, Sequence[tuple[int, float]]], own: float, model: str, path: Path) -> None:
    """Draws the accuracy of a model's alternatives over the depth at which they begin (figures 10 and 11).
    `lines` are depths in layers and accuracies from 0 to 1, by the alternative's name; `own` is that of the
    model itself."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for number, (name, line) in enumerate(lines.items()):
            style = ("-", "--", ":")[number // len(_SHARED) % 3]
            color = _SHARED[number % len(_SHARED)]
            axes.plot(*zip(*line, strict=True), style, color=color, marker="o", markersize=3, label=name)
        axes.axhline(own, color=_MUTED, linewidth=0.8, label=model)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel(f"layers of {model} in front")
        axes.set_ylabel("next tokens that are right")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        _save(figure, path)


def _colors(blocks: Mapping[str, Sequence[ChainBlock]]) -> dict[str, str]:
    """Colours of the blocks that several chains have, in the order in which they are met."""
    shared: dict[str, None] = {}
    for own in blocks.values():
        shared.update((block.id, None) for block in own if len(block.users) > 1)
    return {block: _SHARED[number % len(_SHARED)] for number, block in enumerate(shared)}


def title_of(block: ChainBlock, labels: Sequence[str]) -> str:
    """A block's short name: its first and its last component's."""
    first, last = labels[block.start], labels[block.stop - 1]
    return first if block.stop - block.start == 1 else f"{first}–{last}"


def _box(axes: Any, block: ChainBlock, row: int, color: str, title: str) -> None:
    is_equivalent = bool(block.equivalents)
    axes.add_patch(
        FancyBboxPatch(
            (block.start + 0.08, row - 0.28), block.stop - block.start - 0.16, 0.56,
            boxstyle="round,pad=0,rounding_size=0.08", facecolor=color, mutation_aspect=1.0,
            edgecolor=_TEXT if is_equivalent else "none", linestyle="--" if is_equivalent else "-",
        )
    )  # fmt: skip
    ink = _TEXT if color == _OWN else "white"
    axes.text((block.start + block.stop) / 2, row, title, ha="center", va="center", color=ink, fontsize=7)


def _save(figure: Any, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, facecolor="white", dpi=80, metadata=metadata)


def rows_of(
    blocks: Mapping[str, Sequence[ChainBlock]], labels: Mapping[str, Sequence[str]]
) -> Iterator[list[str]]:
    """The chains as rows of a table: application, blocks, and how many of them other chains have too."""
    for name, own in blocks.items():
        shown = [f"[{title_of(block, labels[name])}]" for block in own]
        shared = sum(len(block.users) > 1 for block in own)
        yield [name, " ".join(shown), f"{shared} of {len(own)}"]
