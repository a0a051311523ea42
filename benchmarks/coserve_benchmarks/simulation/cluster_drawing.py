"""BlockLLM's figures 16 and 18 to 26, of the series that `coserve bench cluster` and
`coserve simulate --check` wrote."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.drawing import BOUND, MUTED, OUTPUT, RULE, new_figure, save, style

_COLORS: Final = {"blocks": OUTPUT, "adaptive": BOUND, "merged": MUTED, "models": RULE}
_COLUMNS: Final = 3
Rows = Sequence[Sequence[Any]]


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Draws the figures that the results have, by the file's ending; folders that are missing are made. A
    quick run has none of figures 16, 22 and 23."""
    series = results["series"]
    shown = {name: panel for name, panel in _PANELS.items() if f"blockllm.fig{name}" in series}
    with style():
        lines = -(-len(shown) // _COLUMNS)
        figure = new_figure(12.4, 2.9 * lines)
        places = [*figure.subplots(lines, _COLUMNS, squeeze=False).flat]
        for axes, (name, panel) in zip(places, shown.items(), strict=False):
            panel(axes, series[f"blockllm.fig{name}"])
            axes.set_title(f"{axes.get_title(loc='left')} (figure {name})", fontsize=8)
        for axes in places[len(shown) :]:
            axes.set_axis_off()
        save(figure, path)


def _adaptation(axes: Any, rows: Rows) -> None:
    at, come, own = zip(*rows, strict=True)
    axes.plot(at, come, color=OUTPUT, label="requests a second")
    axes.set(xlabel="seconds", ylim=(0, None), title="arrivals, and rows through their chain's own blocks")
    share = axes.twinx()
    share.plot(at, [100 * one for one in own], "--", color=BOUND, label="own blocks, %")
    share.set(ylim=(0, 105), ylabel="%")
    share.grid(False)
    lines = [*axes.lines, *share.lines]
    axes.legend(lines, [line.get_label() for line in lines])


def _distributions(axes: Any, rows: Rows) -> None:
    for kind, own in _by_first(rows).items():
        shares, seconds = zip(*own, strict=True)
        axes.plot(seconds, [100 * share for share in shares], color=_COLORS[kind], label=kind)
    axes.set(xlabel="seconds until an answer is complete", ylabel="% of the answers", title="latency")
    axes.set(xlim=(0, None), ylim=(0, 100))
    axes.legend()


def _throughput(axes: Any, rows: Rows) -> None:
    kinds, rates, busy = zip(*rows, strict=True)
    bars = axes.bar(kinds, rates, color=[_COLORS[kind] for kind in kinds])
    axes.bar_label(bars, [f"{share:.0%} busy" for share in busy], fontsize=7)
    axes.set(ylabel="tokens a second", title="throughput and devices that compute")
    axes.margins(y=0.15)


def _utilization(axes: Any, rows: Rows) -> None:
    for kind, own in _by_first(rows).items():
        at, busy = zip(*own, strict=True)
        axes.plot(at, [100 * share for share in busy], color=_COLORS[kind], label=kind)
    axes.set(xlabel="seconds", ylabel="% of devices", ylim=(0, 105), title="devices that compute")
    axes.legend()


def _memory(axes: Any, rows: Rows) -> None:
    kinds, blocks, pages = zip(*rows, strict=True)
    axes.bar(kinds, blocks, color=MUTED, label="blocks")
    axes.bar(kinds, pages, bottom=blocks, color=OUTPUT, label="pages")
    axes.set(ylabel="GB on all workers", title="memory of parameters and requests")
    axes.legend()


def _growth(axes: Any, rows: Rows) -> None:
    counts, rates, tails = zip(*rows, strict=True)
    axes.plot(counts, rates, "o-", color=OUTPUT, label="throughput")
    axes.plot(counts, tails, "o-", color=BOUND, label="95th percentile")
    axes.axhline(1.0, color=RULE)
    axes.set(xlabel="applications", ylim=(0, None), title="shared blocks over a model each")
    axes.legend()


def _similarities(axes: Any, rows: Rows) -> None:
    shades = (MUTED, OUTPUT, BOUND, RULE)
    for color, (rate, own) in zip(shades, _by_first(rows).items(), strict=False):
        adapted, shares, found = zip(*own, strict=True)
        label = f"{rate:g} requests/s, {adapted[0]:.0%} adapted"
        axes.step(found, [100 * share for share in shares], where="post", color=color, label=label)
    axes.set(xlabel="cosine of vocabulary distributions, assumed by the share of stand-ins", ylim=(0, 100))
    axes.set(ylabel="% of the adapted answers", title="adapted answers")
    axes.legend()


def _compared(title: str, columns: Sequence[str]) -> Callable[[Any, Rows], None]:
    """A panel of policies beside the first one, column by column."""

    def panel(axes: Any, rows: Rows) -> None:
        width = 0.8 / len(rows)
        first = rows[0][1:]
        colors = (OUTPUT, BOUND, MUTED, RULE, "0.8")
        for number, (name, *values) in enumerate(rows):
            places = [place + number * width for place in range(len(columns))]
            over = [value / base if base else 0.0 for value, base in zip(values, first, strict=True)]
            axes.bar(places, over, width, color=colors[number % len(colors)], label=name)
        middles = [place + 0.4 - width / 2 for place in range(len(columns))]
        axes.set_xticks(middles, columns)
        axes.axhline(1.0, color=RULE)
        axes.margins(y=0.4)  # the legend is above the bars
        axes.set(ylabel=f"over {rows[0][0]}", title=title)
        axes.legend(ncols=2, loc="upper left")

    return panel


def _placements(axes: Any, rows: Rows) -> None:
    """One bar for each way, of the mean over orders of names, which are behind the comma."""
    found: dict[str, list[Sequence[float]]] = {}
    for name, *values in rows:
        found.setdefault(name.partition(",")[0], []).append(values)
    means = [
        [name, *(sum(column) / len(own) for column in zip(*own, strict=True))] for name, own in found.items()
    ]
    _compared("placement", ("median", "95 %", "tokens/s", "transfers"))(axes, means)


def _by_first(rows: Rows) -> dict[Any, list[Sequence[float]]]:
    found: dict[Any, list[Sequence[float]]] = {}
    for name, *values in rows:
        found.setdefault(name, []).append(values)
    return found


_PANELS: Final[Mapping[str, Callable[[Any, Rows], None]]] = {
    "16": _adaptation,
    "18": _distributions,
    "19": _throughput,
    "20": _utilization,
    "21": _memory,
    "22": _growth,
    "23": _similarities,
    "24": _compared("dispatch", ("median", "95 %", "tokens/s", "transfers")),
    "25": _compared("speculation", ("median", "95 %", "tokens/s")),
    "26": _placements,
}
