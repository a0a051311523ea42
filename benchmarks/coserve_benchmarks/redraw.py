"""Pictures and pages of runs that are over, from the JSON they wrote."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from coserve.errors import ConfigError

PAGES: Final = (".html", ".htm")


def redraw(results: Path, out: Path) -> None:
    """Draws what `--json` wrote: a page where `out` ends in .html, else a picture, SVG or PNG by its ending.

    Raises ConfigError where `results` is no JSON of a bench, or of one that has no such picture.
    """
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{results}: expected the JSON that a bench wrote: {error}") from error
    is_page = out.suffix.lower() in PAGES
    place = _place(found, is_page) if isinstance(found, dict) else None
    if place is None:
        raise ConfigError(f"{results} holds nothing that a {'page' if is_page else 'picture'} is drawn of")
    module, name = place
    getattr(import_module(module), name)(found, out)


def _place(found: Mapping[str, Any], is_page: bool) -> tuple[str, str] | None:
    """Module and function that draw these results; None where nothing does."""
    ours = "coserve_benchmarks."
    series = found.get("series") or {}
    if is_page:
        return (ours + "policies.page", "write_page") if "workloads" in found else None
    if "workloads" in found:
        return ours + "policies.figures", "draw"
    if "ablation" in found:
        return ours + "memory.ablation", "draw_ablation"
    if "figure" in found:
        return ours + "adapters.drawing", "draw"
    if {"rows", "dtype"} <= found.keys():
        return "coserve.plan.picture", "draw"
    if any(name.startswith("trains[") for name in series):
        return ours + "methods.curves", "draw"
    if any(name.startswith(("blocking.", "coserve.")) for name in series):
        return ours + "report", "draw"
    return None
