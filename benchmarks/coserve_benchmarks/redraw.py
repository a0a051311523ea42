"""Pictures and pages of runs that are over, from the JSON they wrote."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from coserve.errors import ConfigError
from coserve_benchmarks.stale import mark_page

PAGES: Final = (".html", ".htm")
SHEETS: Final = (".md",)


def redraw(results: Path, out: Path) -> None:
    """Draws what `--json` wrote: a page where `out` ends in .html, tables in a page where it ends in
    .md, else a picture, SVG or PNG by its ending.

    The page that presents a committed result gets the line that says which commit was measured.

    Raises ConfigError where `results` is no JSON of a bench, or of one that has no such picture.
    """
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{results}: expected the JSON that a bench wrote: {error}") from error
    ending = out.suffix.lower()
    kind = "page" if ending in PAGES else "table" if ending in SHEETS else "picture"
    place = _place(found, kind) if isinstance(found, dict) else None
    if place is None:
        raise ConfigError(f"{results} holds nothing that a {kind} is drawn of")
    module, name = place
    getattr(import_module(module), name)(found, out)
    if kind == "table":
        mark_page(results, out)


def _place(found: Mapping[str, Any], kind: str) -> tuple[str, str] | None:
    """Module and function that draw these results; None where nothing does."""
    ours = "coserve_benchmarks."
    series = found.get("series") or {}
    if kind == "table":
        if "types" in found:
            return ours + "models.page", "write_page"
        if "cells" in found:
            return ours + "policies.sheet", "write_cells"
        return (ours + "rows_page", "write_rows") if "bars" in found else None
    if kind == "page":
        return (ours + "policies.page", "write_page") if "workloads" in found else None
    if "cells" in found:
        return ours + "policies.sheet", "draw"
    if "workloads" in found:
        return ours + "policies.figures", "draw"
    if "ablation" in found:
        return ours + "memory.ablation", "draw_ablation"
    if "figure" in found:
        return ours + "adapters.drawing", "draw"
    if {"rows", "dtype"} <= found.keys():
        return "coserve.plan.picture", "draw"
    if "share.share" in series:
        return ours + "streamed.drawing", "draw"
    if "deferral.bounds" in series:
        return ours + "streamed.drawing", "draw_deferral"
    if "clients.split.rate" in series:
        return ours + "split.drawing", "draw"
    if "blockllm.fig18" in series and "flexllm.fig16" not in series:
        return ours + "simulation.cluster_drawing", "draw"
    if "flexllm.fig16" in series:
        return ours + "simulation.drawing", "draw"
    if "rl.reward.turns" in series:
        return ours + "training.drawing", "draw"
    if any(name.startswith("trains[") for name in series):
        return ours + "methods.curves", "draw"
    if any(name.startswith(("blocking.", "coserve.")) for name in series):
        return ours + "report", "draw"
    return None
