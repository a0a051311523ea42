"""The tables of the page, as HTML made from the dictionary of a run. Everything from outside is escaped."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from coserve_benchmarks.policies.drawing.figures import bounds_of, runs_of, workloads_of
from coserve_benchmarks.policies.drawing.ink import Ink

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


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; the first column names the rows."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = (f'<tr><th scope="row">{cells[0]}</th>{"".join(map(_cell, cells[1:]))}</tr>' for cells in rows)
    opened = f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>'
    return f"{opened}{''.join(lines)}</tbody></table></div>"


def keys(results: Mapping[str, Any]) -> str:
    """Each key against its bar, and whether it is met."""
    rows = []
    verdicts = {
        True: '<span class="pill good">met</span>',
        False: '<span class="pill bad">missed</span>',
        None: "",
    }
    for key, bar in results.get("bars", {}).items():
        name, said = f"<code>{escape(key)}</code>", escape(str(bar))
        if key not in results:
            rows.append((name, "not run", "", said, ""))
            continue
        spread = results.get("spreads", {}).get(key)
        between = "" if spread is None else " – ".join(number(end) for end in spread)
        rows.append((name, number(results[key]), between, said, verdicts[results.get("met", {}).get(key)]))
    return table(("key", "value", "spread", "bar", ""), rows, "keys") if rows else ""


def glance(results: Mapping[str, Any], inks: Mapping[str, Ink], ours: str) -> str:
    """Fine-tuning tokens/s of everybody on every workload, and the share of requests within the first
    bound."""
    workloads = workloads_of(results)
    names = list(dict.fromkeys(name for workload in workloads.values() for name in runs_of(workload)))
    if not names:
        return ""
    most = {
        key: max([1e-9, *(run.get("training") or 0.0 for run in runs_of(workload).values())])
        for key, workload in workloads.items()
    }
    rows = [
        (
            contestant(name, inks, ours),
            *(_glanced(runs_of(workload).get(name), most[key]) for key, workload in workloads.items()),
        )
        for name in names
    ]
    return table(("", *workloads), rows, "glance")


def contestants(workload: Mapping[str, Any], inks: Mapping[str, Ink], ours: str) -> str:
    """Every figure of every contestant of one workload; the best of each column is marked."""
    runs = runs_of(workload)
    columns = _columns(runs)
    if not runs or not columns:
        return ""
    best = {column: _best(column, runs.values()) for column in columns}
    most = {column: max([1e-9, *_values(column, runs.values())]) for column in columns}
    body = []
    for name, run in runs.items():
        cells = "".join(_figure(column, run, best[column], most[column]) for column in columns)
        row = f'<th scope="row">{contestant(name, inks, ours)}</th>{cells}'
        mark = ' class="ours"' if name == ours else ""
        body.append(f"<tr{mark}>{row}</tr>")
    groups = Counter(column.group for column in columns)
    above = "".join(
        f'<th scope="colgroup" colspan="{width}">{escape(group)}</th>' for group, width in groups.items()
    )
    under = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    head = f"<thead><tr><th></th>{above}</tr><tr><th></th>{under}</tr></thead>"
    return f'<div class="scroll"><table class="figures">{head}<tbody>{"".join(body)}</tbody></table></div>'


def switch(found: Mapping[str, Any]) -> str:
    """What a switch between the two kinds of work costs, beside FineInfer's table 1 as published."""
    names = [*_SWITCH, *(key for key in found if key not in _SWITCH)]
    rows = []
    for name in names:
        own = found.get(name)
        if own is None and name not in _PUBLISHED:
            continue
        published = _PUBLISHED.get(name, (_NOTHING,) * 3)
        shown = _NOTHING if own is None else escape(own) if isinstance(own, str) else number(own)
        rows.append((escape(_SWITCH.get(name, name.replace("_", " "))), shown, *published))
    theirs = (f"{name}, as published" for name in ("FineInfer", "DeepSpeed", "Colossal-AI"))
    return table(("seconds", "coserve, here", *theirs), rows, "switch")


def absolute(results: Mapping[str, Any]) -> str:
    """Every absolute figure beside its floor."""
    rows = []
    for name, figure in results.get("figures", {}).items():
        low, high, floor = figure.get("low"), figure.get("high"), figure.get("floor")
        between = "" if low is None or high is None else f"{number(low)} – {number(high)}"
        bound = "" if floor is None else number(floor)
        rows.append(
            (escape(name), number(figure["value"]), between, bound, escape(str(figure.get("unit", ""))))
        )
    return table(("figure", "value", "spread", "floor", "unit"), rows) if rows else ""


def contestant(name: str, inks: Mapping[str, Ink], ours: str) -> str:
    """A name behind its colour."""
    place = list(inks).index(name)
    said = f"<strong>{escape(name)}</strong>" if name == ours else escape(name)
    return f'<i class="dot" style="background: var(--c{place})"></i>{said}'


def number(value: float) -> str:
    """Whole above a hundred, three digits that mean something below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _columns(runs: Mapping[str, Run]) -> list[_Column]:
    """Those of which at least one contestant has a figure."""
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


def _figure(column: _Column, run: Run, best: str | None, most: float) -> str:
    value = column.value(run)
    if value is None:
        return f"<td>{_NOTHING}</td>"
    text = column.text(value)
    said = f"<b>{text}</b>" if text == best else text
    return _barred(said, value / most) if column.bar else f"<td>{said}</td>"


def _glanced(run: Run | None, most: float) -> str:
    if run is None or run.get("training") is None:
        return _NOTHING
    share = next(iter((run.get("attainment") or {}).values()), None)
    grade = "" if share is None else "good" if share >= _GOOD else "fair" if share >= _FAIR else "bad"
    kept = "" if share is None else f'<small class="{grade}">{_percent(share)}</small>'
    return f"{_bar(run['training'] / most)}{number(run['training'])}{kept}"


def _cell(inner: str) -> str:
    return f"<td>{inner}</td>"


def _barred(said: str, share: float) -> str:
    return f'<td class="barred">{_bar(share)}{said}</td>'


def _bar(share: float) -> str:
    return f'<span class="bar" style="--share: {share:.3f}"></span>'


def _percent(share: float) -> str:
    """Never 100% unless it is."""
    shown = f"{share:.1%}"
    return "100%" if share >= 1 else "99.9%" if shown == "100.0%" else shown
