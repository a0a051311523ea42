"""The page's tables and the picture of a simulated contest, from its JSON.

`coserve bench draw docs/results/contest.json docs/results/policies.md` replaces what stands between the
page's two marks; everything else stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import new_figure, save, style
from coserve_benchmarks.markdown import number, table, write_between
from coserve_benchmarks.policies.cells import ALONE, FIGURES
from coserve_benchmarks.policies.charts import legend_of
from coserve_benchmarks.policies.contest import OURS, PROMISED
from coserve_benchmarks.policies.ink import inks

BEGIN: Final = "<!-- cells: made of contest.json by coserve bench draw -->"
END: Final = "<!-- end of cells -->"
FEWEST: Final = 200  # requests of a cell; fewer are an anecdote
_DRAWN: Final = ("poisson", "flexllm", "azure", "tiers")  # traffics of the picture, those that are there
_PROMISING: Final = ("hybrid", OURS)  # policies that keep bounds

Cell = Mapping[str, float | None]


def cells_of(column: Mapping[str, Any]) -> dict[str, Cell]:
    """The cells of a traffic at a load, by policy and figure."""
    return {name: dict(zip(FIGURES, row, strict=True)) for name, row in column["cells"].items()}


def write_cells(found: Mapping[str, Any], path: str | Path) -> None:
    """Writes the tables into a page. Raises ConfigError where the page has no marks for them."""
    write_between(BEGIN, END, lambda: render(found), path)


def render(found: Mapping[str, Any]) -> str:
    """The tables: what promises bounds and does not keep them, every traffic, and the check in real time."""
    parts = [_source(found), _missed(found), *(_check(found) if "check" in found else ())]
    for name, columns in found["cells"].items():
        parts += [_traffic(name, columns), _details(columns)]
    return "\n".join(parts)


def _source(found: Mapping[str, Any]) -> str:
    runs = [*found.get("earlier", ()), found]
    commits = dict.fromkeys(str(run["code"].get("commit"))[:10] for run in runs)
    dirty = ", with changes that were not committed" if any(run["code"].get("dirty") for run in runs) else ""
    return f"`{found['command']}`, {found['date']}; commit {', '.join(commits)}{dirty}.\n"


def _missed(found: Mapping[str, Any]) -> str:
    """Every cell in which a policy that keeps bounds does not keep 99 % of them, or leaves a request."""
    rows = []
    for name, columns in found["cells"].items():
        for load, column in columns.items():
            cells = cells_of(column)
            for policy in _PROMISING:
                if policy in cells and (
                    cells[policy]["unanswered"] or _of(cells[policy], "within") < PROMISED
                ):
                    kept = _kept(cells[policy])
                    rows.append(
                        (name, load, policy, kept, str(cells[policy]["unanswered"]), _kept(cells[ALONE]))
                    )
    total = sum(
        p in c["cells"] for cols in found["cells"].values() for c in cols.values() for p in _PROMISING
    )
    said = f"Of {total} cells of `hybrid` and `adaptive` {len(rows)} have less than 99 % within bounds"
    if not rows:
        return f"{said}, and none a request without an answer.\n"
    head = ("traffic", "load", "policy", "within bounds", "unanswered", "without training")
    return f"{said}, or requests without an answer:\n\n{_table(head, rows)}"


def _traffic(name: str, columns: Mapping[str, Any]) -> str:
    """Share within bounds, fine-tuning tokens/s, and who has no answer, by policy and load."""
    loads = list(columns)
    first = columns[loads[0]]
    everybody = dict.fromkeys(policy for column in columns.values() for policy in column["cells"])
    rows = []
    for policy in everybody:
        cells = [cells_of(column).get(policy) for column in columns.values()]
        rows.append((f"**{policy}**" if policy == OURS else policy, *map(_summary, cells)))
    facts = [
        ("*requests a second*", *(number(column["rate"]) for column in columns.values())),
        ("*trained alone*", *(number(column["peak"]) for column in columns.values())),
        ("*bounds*", *(str(column["bounds"]) for column in columns.values())),
    ]
    counts = {int(row[0]) for column in columns.values() for row in column["cells"].values()}
    few = ", an anecdote" if min(counts) < FEWEST else ""
    asked = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    shown = _table(("policy", *(f"load {load}" for load in loads)), [*rows, *facts])
    return f"### {name}\n\n{first['title']}; {asked} requests a cell{few}.\n\n{shown}"


def _details(columns: Mapping[str, Any]) -> str:
    """Intervals and times without training and of the policies that keep bounds; the JSON has all."""
    rows = []
    for load, column in columns.items():
        cells = cells_of(column)
        for policy, one in ((name, cells[name]) for name in (ALONE, *_PROMISING) if name in cells):
            times = (_times(one, "first_token"), _times(one, "between"), _shown(one["slowdown"]))
            trained = (
                f"{_shown(one['training'])} [{_shown(one['training_low'])}, {_shown(one['training_high'])}]"
            )
            rows.append((load, policy, _kept(one), trained, *times))
    head = ("load", "policy", "within bounds", "trained tokens/s", "first token p50 / p99, s",
            "between tokens p50 / p99, s", "slowdown")  # fmt: skip
    said = "intervals and times (of other policies: contest.json)"
    return f"<details><summary>{said}</summary>\n\n{_table(head, rows)}\n</details>\n"


def _check(found: Mapping[str, Any]) -> Iterable[str]:
    """Real rounds beside simulated ones of the same requests."""
    check = found["check"]
    rows = []
    for load, sides in check["loads"].items():
        for side in ("real", "simulated"):
            for policy, row in sides[side].items():
                one = dict(zip(FIGURES, row, strict=True))
                times = (_times(one, "first_token"), _times(one, "between"), _shown(one["slowdown"]))
                trained = _rate(one)
                rows.append((load, policy, side, str(one["requests"]), _kept(one), trained, *times))
    head = ("load", "policy", "", "requests", "within bounds", "trained tokens/s",
            "first token p50 / p99, s", "between tokens p50 / p99, s", "slowdown")  # fmt: skip
    yield f"### Real rounds beside simulated ones\n\n{check['said']}\n\n{_table(head, rows)}"


def draw(found: Mapping[str, Any], path: str | Path) -> None:
    """The picture: for some traffics the share within bounds and the share of training, by load."""
    there = found["cells"]
    names = [name for name in _DRAWN if name in there] or list(there)[: len(_DRAWN)]
    policies = dict.fromkeys(p for name in names for c in there[name].values() for p in c["cells"])
    ink = inks(policies, OURS)
    with style():
        figure = new_figure(3.1 * len(names), 5.2)
        grid = figure.subplots(2, len(names), squeeze=False, sharex=True)
        for place, name in enumerate(names):
            for axes, value in zip(grid[:, place], (_within, _trained), strict=True):
                for policy in policies:
                    if value is _trained and policy == ALONE:
                        continue
                    points = _points(there[name], policy, value)
                    one = ink[policy]
                    axes.plot(*points, label=policy, color=one.color, linestyle=one.dash, marker=one.marker,
                              linewidth=one.width, markersize=4, zorder=one.order)  # fmt: skip
                axes.set_ylim(-0.03, 1.03)
            grid[0][place].set_title(name)
            grid[1][place].set_xlabel("load, of the capacity")
        grid[0][0].set_ylabel("requests within bounds")
        grid[1][0].set_ylabel("trained, of training alone")
        legend_of(figure, list(grid.flat), columns=6)
        save(figure, path)


def _points(columns: Mapping[str, Any], policy: str, value: Any) -> tuple[list[float], list[float]]:
    found = [
        (float(load), value(cells_of(column)[policy], column))
        for load, column in columns.items()
        if policy in column["cells"]
    ]
    return [at for at, _ in found], [share for _, share in found]


def _within(one: Cell, _: Mapping[str, Any]) -> float:
    return _of(one, "within")


def _trained(one: Cell, column: Mapping[str, Any]) -> float:
    peak: float = column["peak"]
    return _of(one, "training") / peak


def _of(one: Cell, figure: str) -> float:
    value = one[figure]
    assert value is not None, f"every cell has {figure}"
    return value


def _summary(one: Cell | None) -> str:
    if one is None:
        return "–"
    left = f", **{one['unanswered']} unanswered**" if one["unanswered"] else ""
    return f"{_of(one, 'within'):.1%} · {_shown(one['training'])}{left}"


def _kept(one: Cell) -> str:
    return f"{_of(one, 'within'):.1%} [{_of(one, 'within_low'):.1%}, {_of(one, 'within_high'):.1%}]"


def _rate(one: Cell) -> str:
    low, high = (_shown(one[f"training_{end}"]) for end in ("low", "high"))
    return f"{_shown(one['training'])} [{low}, {high}]"


def _times(one: Cell, figure: str) -> str:
    return f"{_shown(one[f'{figure}_p50'])} / {_shown(one[f'{figure}_p99'])}"


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"{line}\n" for line in table(head, rows))
