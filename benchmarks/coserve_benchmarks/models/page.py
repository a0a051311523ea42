"""The table of `docs/models.md`, from the JSON of `coserve bench models`. Free of torch.

`coserve bench draw docs/results/models.json docs/models.md` replaces what stands between the page's marks.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.markdown import table, write_between
from coserve_benchmarks.rows_page import BEGIN, END

_ERRORS: Final = ("answers", "training", "streamed", "split", "quantized")
_HEAD: Final = ("type", *_ERRORS, "methods that it does not take")


def write_page(found: Mapping[str, Any], path: str | Path) -> None:
    """Writes the table into a page. Raises ConfigError where the page has no marks for it."""
    write_between(BEGIN, END, lambda: render(found), path)


def render(found: Mapping[str, Any]) -> str:
    """Numbers of types by what became of them, and a table of each kind."""
    types = found["types"]
    by_kind: dict[str, list[Mapping[str, Any]]] = {"exact": [], "refused": [], "not built": [], "fault": []}
    for name in sorted(types):
        by_kind.setdefault(kind_of(types[name]), []).append(types[name])
    built = len(types) - len(by_kind["not built"])
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"`coserve bench models`, {found['date']} UTC, {versions}: of {len(types)} types transformers builds "
        f"{built} small. Of these {len(by_kind['exact'])} are exact (`exact_share` "
        f"{found['exact_share']:.3f}), {len(by_kind['refused'])} refused, {len(by_kind['fault'])} faulty. "
        "Of the types of sixty text models that are downloaded most "
        f"{found.get('exact_share.downloaded', 0.0):.3f} are exact.",
        "",
        "## Exact",
        "",
        *table(_HEAD, [_row(one) for one in by_kind["exact"]]),
        "",
        *_oracles(by_kind["exact"]),
        "## Refused",
        "",
        *table(("type", "in its own words"), [(f"`{o['name']}`", cell(o)) for o in by_kind["refused"]]),
        "",
    ]
    if by_kind["fault"]:
        faults = [(f"`{one['name']}`", one["fault"]) for one in by_kind["fault"]]
        lines += ["## Faulty", "", *table(("type", "fault"), faults), ""]
    unbuilt = ", ".join(f"`{one['name']}`" for one in by_kind["not built"])
    lines += ["## Not built small", "", f"{unbuilt}." if unbuilt else "None.", ""]
    return "\n".join(lines)


def _oracles(exact: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each type that is compared with another oracle than its forward in float32."""
    for one in exact:
        for what in ("", *(f"{column}." for column in _ERRORS)):
            for word in ("exact", "decoded"):
                if said := one["words"].get(f"{what}{word}"):
                    column = f" ({what.rstrip('.')})" if what else ""
                    yield from (f"- `{one['name']}`{column}: {said}.", "")


def kind_of(one: Mapping[str, Any]) -> str:
    """A type is exact, refused, not built or a fault."""
    if one["fault"]:
        return "fault"
    if one["unbuilt"]:
        return "not built"
    return "refused" if one["refused"] or one["training"] is None else "exact"


def cell(one: Mapping[str, Any]) -> str:
    """A line about a type."""
    if one["fault"]:
        return f"FAULT: {one['fault']}"
    if one["unbuilt"]:
        return f"not built: {one['unbuilt']}"
    if one["refused"]:
        return str(one["refused"])
    if one["training"] is None:
        return f"answers exactly ({_error(one, 'answers')}); training: {one['words'].get('training', '')}"
    return f"answers {_error(one, 'answers')}, training {_error(one, 'training')}"


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    without = one["without"]
    named = ", ".join(without) if without else "none"
    return f"`{one['name']}`", *(_error(one, what) for what in _ERRORS), named


def _error(one: Mapping[str, Any], what: str) -> str:
    if what not in one:  # by a run that had no such column
        return "not tried"
    error = one[what]
    return f"refused: {one['words'].get(what, '')}" if error is None else f"{error:.0e}"
