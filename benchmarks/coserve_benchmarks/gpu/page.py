"""The Markdown table of a run, and the bars that its figures have to reach."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from coserve_benchmarks.markdown import number, table
from coserve_benchmarks.results import Bar

# Of the 8B shape on an H200, in the units of the figures.
BARS: Final[Mapping[str, Bar]] = {
    **{
        f"decode.step[{rows}]": Bar(ms, at_most=True)
        for rows, ms in ((1, 4.8), (8, 5.0), (32, 5.4), (128, 7.5), (256, 10.2))
    },
    "decode.with_32_adapters": Bar(1.15, at_most=True),
    "prefill[1x128]": Bar(8.0, at_most=True),
    "prefill[1x512]": Bar(14.0, at_most=True),
    "training[everything].mfu": Bar(0.48),
    **{
        f"coserving[{case}].{what}": Bar(value)
        for case, trains in (
            ("50 ms", 0.55),
            ("50 ms, concurrent", 0.70),
            ("20 ms", 0.30),
            ("20 ms, concurrent", 0.45),
            ("50 ms, 0.2 of capacity", 0.80),
            ("50 ms, 0.9 of capacity", 0.20),
        )
        for what, value in (("attainment", 0.99), ("training", trains))
    },
    "like_for_like.rate": Bar(11_700.0),  # tokens/s that Surogate states; Unsloth: 9,100
}


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
    bars = BARS if run["shape"] == "8b" and run["device"] != "cpu" else {}
    for part in run["parts"]:
        yield from _part(part, bars)


def _outcomes(parts: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        wrong = len(part["found"].get("failures", ()))
        status = f"done, {wrong} wrong" if part["status"] == "done" and wrong else part["status"]
        yield part["part"], status, f"{part['seconds']:.0f}"


def _part(part: dict[str, Any], bars: Mapping[str, Bar]) -> Iterator[str]:
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
        yield from table(
            ("figure", "value", "unit", "bound", "share", "bar", "note"), map(partial(_row, bars), figures)
        )
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


def _row(bars: Mapping[str, Bar], figure: dict[str, Any]) -> tuple[str, ...]:
    bar, value = bars.get(figure["name"]), figure["value"]
    reached = "" if bar is None else f"{bar} ({'met' if bar.is_met(value) else 'missed'})"
    return (
        figure["name"], _shown(value), figure["unit"], _shown(figure["bound"]), _shown(figure["share"]),
        reached, figure["note"],
    )  # fmt: skip


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return number(value, whole=1000)
