"""Cells of the page's tables, made from the dictionary of a run."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coserve_benchmarks.markdown import number
from coserve_benchmarks.policies.figures import bounds_of, runs_of, workloads_of

Run = Mapping[str, Any]
_NOTHING: Final = "–"
_GOOD, _FAIR = 0.99, 0.9  # shares of requests within their bounds
# Table 1 of the paper, on its machine: seconds for a fine-tuning / an inference task; data movement is given
# once for both.
_PUBLISHED: Final[Mapping[str, tuple[str, str, str]]] = {
    "initialisation": ("0 / 0", "1.153 / 0.015", "0.28 / 0.045"),
    "clean_up": ("0 / 0", "2.330 / 1.252", "3.456 / 1.376"),
    "data_movement": ("0 – 0.052", "5.882", "5.918"),
}
_SWITCH: Final = {
    "initialisation": "task initialisation",
    "clean_up": "task clean-up",
    "data_movement": "data movement",
    "seconds": "measured from one kind of work to the other",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """One figure of every contestant; `best` chooses among them where less or more is better."""

    group: str
    heading: str
    value: Callable[[Run], float | None]
    text: Callable[[float], str]
    best: Callable[[Iterable[float]], float] | None = None
    bar: bool = False  # shows its share of the greatest behind the number


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key against its bar; `met` is None where there is nothing to meet."""

    key: str
    value: str
    spread: str
    bar: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a contestant; whether it is the `best` of its column, and where a bar shows it, its
    `share` of the greatest."""

    text: str
    best: bool = False
    share: float | None = None
    kept: str = ""  # share of the requests within a bound
    grade: str = ""  # good, fair or bad, of that


@dataclass(frozen=True, slots=True)
class ContestTable:
    """Every figure of every contestant of one workload: `groups` of columns with their widths, and rows by
    contestant."""

    groups: Sequence[tuple[str, int]]
    columns: Sequence[_Column]
    rows: Mapping[str, Sequence[Cell]]


def keys(results: Mapping[str, Any]) -> list[KeyRow]:
    """Each key against its bar, and whether it is met."""
    rows = []
    for key, bar in results.get("bars", {}).items():
        if key not in results:  # its group has not run
            continue
        spread = results.get("spreads", {}).get(key)
        between = "" if spread is None else " – ".join(number(end) for end in spread)
        rows.append(KeyRow(key, number(results[key]), between, str(bar), results.get("met", {}).get(key)))
    return rows


def glance(results: Mapping[str, Any]) -> dict[str, list[Cell | None]]:
    """Fine-tuning tokens/s of every contestant on every workload, and the share of requests within the first
    bound."""
    everywhere = [runs_of(workload) for workload in workloads_of(results).values()]
    most = [max([1e-9, *(run.get("training") or 0.0 for run in runs.values())]) for runs in everywhere]
    names = dict.fromkeys(name for runs in everywhere for name in runs)
    return {
        name: [_glanced(runs.get(name), top) for runs, top in zip(everywhere, most, strict=True)]
        for name in names
    }


def contestants(workload: Mapping[str, Any]) -> ContestTable:
    """Every figure of every contestant of one workload; the best of each column is marked."""
    runs = runs_of(workload)
    columns = _columns(runs)
    best = {column: _best(column, runs.values()) for column in columns}
    most = {column: max([1e-9, *_values(column, runs.values())]) for column in columns}
    rows = {
        name: [_figure(column, run, best[column], most[column]) for column in columns]
        for name, run in runs.items()
    }
    return ContestTable(list(Counter(column.group for column in columns).items()), columns, rows)


def switch(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cost of a switch between the two kinds of work, beside FineInfer's table 1 as published."""
    names = [*_SWITCH, *(key for key in found if key not in _SWITCH)] if found else []
    rows: list[tuple[str, ...]] = []
    for name in names:
        own = found.get(name)
        if own is None and name not in _PUBLISHED:
            continue
        shown = _NOTHING if own is None else own if isinstance(own, str) else number(own)
        said = _SWITCH.get(name, name.replace("_", " "))
        rows.append((said, shown, *_PUBLISHED.get(name, (_NOTHING,) * 3)))
    return rows


def absolute(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Every absolute figure beside its floor."""
    rows: list[tuple[str, ...]] = []
    for name, figure in results.get("figures", {}).items():
        low, high, floor = figure.get("low"), figure.get("high"), figure.get("floor")
        between = "" if low is None or high is None else f"{number(low)} – {number(high)}"
        is_wrong = name in results.get("peak_wrong", ())
        bound = "" if floor is None else "the peak is wrong" if is_wrong else number(floor)
        rows.append((name, number(figure["value"]), between, bound, str(figure.get("unit", ""))))
    return rows


def _columns(runs: Mapping[str, Run]) -> list[_Column]:
    """Columns for which at least one contestant has a figure."""
    found = []
    for key, group in (("latency", "latency"), ("first_token", "first token"), ("between", "between tokens")):
        unit, text = _time_unit(key, runs)
        for part in ("mean", "p50", "p99"):
            found.append(_Column(f"{group} ({unit})", part, _timing(key, part), text, min))
    for label in bounds_of(runs):
        found.append(_Column("requests within", label, _attained(label), _percent, max, bar=True))
    found += [
        _Column("fine-tuning", "tokens/s", lambda run: run.get("training"), number, max, bar=True),
        _Column("fine-tuning", "of peak", lambda run: run.get("training_share"), _percent, max),
        _Column("loss", "first", lambda run: (run.get("loss") or (None, None))[0], number),
        _Column("loss", "last", lambda run: (run.get("loss") or (None, None))[1], number, min),
        _Column("processor", "in use", lambda run: run.get("processor"), _percent),
        _Column("requests", "all", lambda run: run.get("requests"), number),
        _Column("requests", "unanswered", lambda run: run.get("unanswered"), number),
    ]
    return [column for column in found if _values(column, runs.values())]


def _time_unit(key: str, runs: Mapping[str, Run]) -> tuple[str, Callable[[float], str]]:
    """Milliseconds where the median contestant's mean is short, else seconds."""
    means = sorted(mean for run in runs.values() if (mean := _timing(key, "mean")(run)) is not None)
    if means and means[len(means) // 2] < 0.2:
        return "ms", lambda value: number(value * 1e3)
    return "s", number


def _timing(key: str, part: str) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found: float | None = (run.get(key) or {}).get(part)
        return found

    return value


def _attained(label: str) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found: float | None = (run.get("attainment") or {}).get(label)
        return found

    return value


def _values(column: _Column, runs: Iterable[Run]) -> list[float]:
    return [value for run in runs if (value := column.value(run)) is not None]


def _best(column: _Column, runs: Iterable[Run]) -> str | None:
    """The best figure as it is written, so that all who show the same are marked."""
    values = _values(column, runs)
    return column.text(column.best(values)) if column.best is not None and len(values) > 1 else None


def _figure(column: _Column, run: Run, best: str | None, most: float) -> Cell:
    value = column.value(run)
    if value is None:
        return Cell(_NOTHING)
    text = column.text(value)
    return Cell(text, text == best, value / most if column.bar else None)


def _glanced(run: Run | None, most: float) -> Cell | None:
    if run is None or run.get("training") is None:
        return None
    share = next(iter((run.get("attainment") or {}).values()), None)
    grade = "" if share is None else "good" if share >= _GOOD else "fair" if share >= _FAIR else "bad"
    kept = "" if share is None else _percent(share)
    return Cell(number(run["training"]), share=run["training"] / most, kept=kept, grade=grade)


def _percent(share: float) -> str:
    """A share in percent; 100% only where it is exact."""
    shown = f"{share:.1%}"
    return "100%" if share >= 1 else "99.9%" if shown == "100.0%" else shown
