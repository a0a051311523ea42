"""The Markdown table of a run."""

from collections.abc import Iterator, Sequence
from typing import Any

from coserve_benchmarks.markdown import number, table


def page_of(run: dict[str, Any]) -> str:
    """The page of a run's JSON."""
    return "\n".join(_lines(run)) + "\n"


def _lines(run: dict[str, Any]) -> Iterator[str]:
    yield f"# coserve on {run['device_name']}"
    yield ""
    if run["device"] == "cpu":
        yield "**This has not run on a GPU**: a processor tried the parts. The figures say nothing of speed."
        yield ""
    yield (
        f"{run['date']}, shape {run['shape']} with random weights, commit {run['commit']}, "
        f"{run['seconds']:.0f} s. Bounds are what the measured rates allow; a share of 1 reaches them."
    )
    yield ""
    yield from table(("part", "outcome", "s"), _outcomes(run["parts"]))
    for part in run["parts"]:
        yield from _part(part)


def _outcomes(parts: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        wrong = len(part["found"].get("failures", ()))
        status = f"done, {wrong} wrong" if part["status"] == "done" and wrong else part["status"]
        yield part["part"], status, f"{part['seconds']:.0f}"


def _part(part: dict[str, Any]) -> Iterator[str]:
    found = part["found"]
    yield ""
    yield f"## {part['part']}"
    yield ""
    for failure in found.get("failures", ()):
        yield f"- **wrong**: {failure}"
    for note in found.get("notes", ()):
        yield f"- {note}"
    if found.get("failures") or found.get("notes"):
        yield ""
    if figures := found.get("figures"):
        yield from table(("figure", "value", "unit", "bound", "share", "goal", "note"), map(_row, figures))
    for name, rows in found.get("tables", {}).items():
        yield ""
        yield f"{name}:"
        yield ""
        yield from table(rows[0], rows[1:])
    if part["tail"]:
        yield ""
        yield "```"
        yield from part["tail"]
        yield "```"


def _row(figure: dict[str, Any]) -> tuple[str, ...]:
    share, goal = figure["share"], figure["goal"]
    reached = (
        "" if goal is None else f"{goal:g} ({'met' if share is not None and share >= goal else 'missed'})"
    )
    return (
        figure["name"], _shown(figure["value"]), figure["unit"], _shown(figure["bound"]), _shown(share),
        reached, figure["note"],
    )  # fmt: skip


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return number(value, whole=1000)
