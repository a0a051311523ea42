"""Draws a sweep: shares within bounds, first tokens and fine-tuning, over rates or by policy. Needs
matplotlib."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import matplotlib
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from coserve.plan.picture import STYLE

_PANELS: Final = (
    ("within", "requests within their bounds", 100.0, "%"),
    ("ttft_p99", "99th percentile of first tokens", 1.0, "s"),
    ("time_per_token_p99", "99th percentile of time per token", 1e3, "ms"),
    ("training", "fine-tuning", 1.0, "tokens/s"),
)
_COLORS: Final = ("#2b6cb0", "#c85a00", "#12856a", "#7a3fc4", "#d1205f", "#4b5563", "#38a3dc", "#a3202c")


def draw(cells: Sequence[Mapping[str, Any]], title: str, file: Path | BinaryIO) -> None:
    """The picture of a sweep's cells (`Cell.as_dict`), as SVG, or PNG where the file's name ends so."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 6.4), layout="constrained")
        several = len({cell["rate"] for cell in cells}) > 1
        for axes, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            (_lines if several else _bars)(axes, cells, *panel)
        figure.suptitle(title, fontsize=10)
        kind = (file.suffix[1:] or "svg") if isinstance(file, Path) else "svg"
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(file, facecolor="white", dpi=80, metadata=metadata, format=kind)


def _series(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Cells by policy and, where there are several, hardware; in order of their rates."""
    devices = {cell["hardware"] for cell in cells}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["rate"] or 0.0):
        name = cell["policy"] if len(devices) == 1 else f"{cell['policy']}, {cell['hardware']}"
        found.setdefault(name, []).append(cell)
    return found


def _lines(
    axes: Any, cells: Sequence[Mapping[str, Any]], name: str, title: str, factor: float, unit: str
) -> None:
    for number, (label, line) in enumerate(_series(cells).items()):
        points = [(one["rate"], one["mean"][name], one["interval"][name]) for one in line]
        points = [point for point in points if point[1] is not None]
        color = _COLORS[number % len(_COLORS)]
        rates, means = [p[0] for p in points], [p[1] * factor for p in points]
        axes.plot(rates, means, marker="o", markersize=3, color=color, label=label)
        if all(point[2] is not None for point in points):
            low, high = ([point[2][end] * factor for point in points] for end in (0, 1))
            axes.fill_between(rates, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(title=title, xlabel="requests/s", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _bars(
    axes: Any, cells: Sequence[Mapping[str, Any]], name: str, title: str, factor: float, unit: str
) -> None:
    for number, (label, line) in enumerate(_series(cells).items()):
        mean, ends = line[0]["mean"][name], line[0]["interval"][name]
        if mean is None:
            continue
        error = None if ends is None else (ends[1] - mean) * factor
        axes.bar(label, mean * factor, yerr=error, color=_COLORS[number % len(_COLORS)])
    axes.set(title=title, ylabel=unit)
    axes.tick_params(axis="x", rotation=20)


def write_page(
    found: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]], path: Path
) -> None:
    """Writes the page of a sweep's results. What a user has named is text there, never markup."""
    picture = BytesIO()
    draw(found["cells"], found["model"]["name"], picture)
    svg = picture.getvalue().decode()
    source = (files("coserve.cli") / "simulate_page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True).from_string(source)
    svg = svg[svg.index("<svg") :]  # matplotlib escapes the texts in it
    path.write_text(
        template.render(found=found, columns=columns, rows=rows, picture=Markup(svg)), encoding="utf-8"
    )
