"""The rows of a run in the page beside its JSON.

`coserve bench draw docs/results/streamed.json docs/results/streamed.md`, and so for others, replaces what
stands between the page's two marks; everything else stays.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.markdown import number, table, write_between
from coserve_benchmarks.report import code_and_load
from coserve_benchmarks.simulation.section import SECTION, paper_tables

BEGIN: Final = "<!-- rows: made by coserve bench draw -->"
END: Final = "<!-- end of rows -->"


def write_rows(found: Mapping[str, Any], path: str | Path) -> None:
    """Writes the rows into a page. Raises ConfigError where the page has no marks for them."""
    write_between(BEGIN, END, lambda: render(found), path)


def render(found: Mapping[str, Any]) -> str:
    """The run, its rows beside their bars, its figures and its notes."""
    rows = [_row(found, key, bar) for key, bar in found["bars"].items()]
    figures = [
        (f"`{name}`", _shown(figure["value"]), figure["unit"]) for name, figure in found["figures"].items()
    ]
    notes = [f"- `{name}`: {text}" for name, text in found["notes"].items()]
    return "\n".join(
        [
            f"{_source(found)}\n",
            *table(("key", "measured", "spread", "bar", ""), rows),
            "",
            *_kinds_of_spreads(found),
            *table(("figure", "", "unit"), figures),
            "",
            *notes,
            *_tables(found),
        ]
    )


def _kinds_of_spreads(found: Mapping[str, Any]) -> Iterable[str]:
    """A line for each kind of spread in the table, with its keys."""
    keys: dict[str, list[str]] = {}
    for key, kind in found.get("spreads_are", {}).items():
        if key in found["spreads"] and key in found["bars"]:
            keys.setdefault(kind, []).append(f"`{key}`")
    return (
        [*(f"- {kind[0].upper()}{kind[1:]}: {', '.join(named)}" for kind, named in keys.items()), ""]
        if keys
        else []
    )


def _tables(found: Mapping[str, Any]) -> Iterable[str]:
    """Tables of papers' settings, where the run has their section."""
    return ["", *paper_tables(found[SECTION])] if found.get(SECTION) else []


def _source(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    dtype = f" in {found['dtype']}" if "dtype" in found else ""
    end = found["ended"] or "no end: it was interrupted"
    return (
        f"`{found['command']}`, {found['date']} to {end}; {code_and_load(found)}. {found['shape']} "
        f"({found['parameters'] / 1e6:,.0f}M parameters){dtype}, {machine['threads']} threads of an "
        f"{machine['cpu']}, torch {machine['torch_version']}; groups {', '.join(found['groups'])}."
    )


def _row(found: Mapping[str, Any], key: str, bar: str) -> tuple[str, ...]:
    if key not in found:
        return f"`{key}`", "not measured", "", bar, ""
    low, high = found["spreads"].get(key, (None, None))
    spread = "" if low is None else f"{_shown(low)} to {_shown(high)}"
    met = {True: "met", False: "missed", None: ""}[found["met"].get(key)]
    return f"`{key}`", _shown(found[key]), spread, bar, met


def _shown(value: float) -> str:
    return number(value, whole=1000)
