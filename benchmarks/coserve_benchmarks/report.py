"""Report of a run: tables for the terminal, and a picture for the documentation.

Both are made from the dictionary that a run returns, or from the JSON it wrote.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coserve_benchmarks.markdown import number

_WRONG = "the peak is wrong"  # where a figure is better than its floor
_INK = {"alone": "#7a7a7a", "together": "#0b6e99", "training": "#d1495b"}


def print_report(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The table of bars, then every absolute figure beside its floor, then how things were measured."""
    console = Console() if console is None else console
    machine = results["machine"]
    console.print(
        f"{results['shape']} ({results['parameters'] / 1e6:.0f}M parameters) on {machine['cpu']}, "
        f"{machine['threads']} threads, torch {machine['torch_version']}, {results['date']}; reads "
        f"{machine['bandwidth'] / 1e9:.0f} GB/s, multiplies {machine['matrix_rate'] / 1e9:.0f} GFLOP/s"
    )
    console.print(code_and_load(results), highlight=False)
    console.print(_keys_table(results))
    console.print(_figures_table(results))
    for name, text in results["notes"].items():
        console.print(f"[bold]{escape(name)}[/bold]: {escape(text)}", highlight=False)


def code_and_load(results: Mapping[str, Any]) -> str:
    """Sentence about the code that a run measured, and about the machine before and after it."""
    code, machine = results.get("code") or {}, results["machine"]
    commit = f"commit {code['commit'][:10]}" if code.get("commit") else "no commit"
    told = [commit + (", with changes that are not committed" if code.get("dirty") else "")]
    for moment in ("before", "after"):
        if state := machine.get(moment):
            told.append(
                f"{moment} the run {state['bandwidth'] / 1e9:.0f} GB/s, {state['matrix_rate'] / 1e9:.0f} "
                f"GFLOP/s, load {state['load'][0]:g}"
            )
    return "; ".join(told)


def _keys_table(results: Mapping[str, Any]) -> Table:
    table = Table(title="against the bars for two cores")
    table.add_column("key", overflow="fold")
    for heading in ("value", "spread", "bar", ""):
        table.add_column(heading, justify="right")
    verdicts = {True: "[green]pass[/green]", False: "[red]miss[/red]", None: ""}
    for key, bar in results["bars"].items():
        if key not in results:  # its group has not run
            continue
        spread = _range(results["spreads"].get(key))
        table.add_row(escape(key), _value(results[key]), spread, bar, verdicts[results["met"].get(key)])
    return table


def _figures_table(results: Mapping[str, Any]) -> Table:
    table = Table(title="absolute figures; the floor is the best this machine could do")
    table.add_column("figure", overflow="fold")
    for heading in ("value", "spread", "floor"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    impossible = results.get("peak_wrong", ())
    for name, figure in results["figures"].items():
        low, high, floor = figure["low"], figure["high"], figure["floor"]
        spread = "" if low is None else _range((low, high))
        floor = "" if floor is None else _WRONG if name in impossible else number(floor)
        table.add_row(escape(name), number(figure["value"]), spread, floor, figure["unit"])
    return table


def draw(results: Mapping[str, Any], path: str | Path) -> None:
    """Latency beside training, time between tokens, and throughput over time, as SVG or PNG by `path`'s
    ending. Panels of groups that have not been run stay empty."""
    from coserve_benchmarks.drawing import new_figure, save, style

    with style():
        figure = new_figure(13, 3.8)
        _draw(results, *figure.subplots(1, 3))
        save(figure, path)


def _draw(results: Mapping[str, Any], waits: Any, gaps: Any, flow: Any) -> None:
    series = results["series"]
    waits.set(title="16-token answers" if results["shape"] == "255m" else "short answers", ylabel="share")
    waits.set_xlabel("latency (s)")
    _cumulative(waits, series.get("blocking.idle", ()), "idle", _INK["alone"])
    _cumulative(waits, series.get("blocking.training", ()), "while a large batch trains", _INK["together"])
    gaps.set(title="requests at half of capacity", xlabel="time between tokens (s)", ylabel="share")
    _cumulative(gaps, series.get("coserve.alone_gaps", ()), "without training", _INK["alone"])
    _cumulative(gaps, series.get("coserve.together_gaps", ()), "with training", _INK["together"])
    _bound(gaps, results["figures"].get("coserve.slo_between_tokens"))
    flow.set(title="throughput with training", xlabel="time (s)", ylabel="tokens/s")
    points = series.get("coserve.together_throughput", ())
    if points:
        seconds, output, trained = zip(*points, strict=True)
        flow.step(seconds, trained, where="post", color=_INK["training"], label="fine-tuning")
        flow.step(seconds, output, where="post", color=_INK["together"], label="output")
    for axes in (waits, gaps, flow):
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best" if axes is flow else "lower right")


def _cumulative(axes: Any, values: Sequence[float], label: str, color: str) -> None:
    """Share of values that are at most x."""
    if values:
        axes.ecdf(values, label=label, color=color)


def _bound(axes: Any, figure: Mapping[str, Any] | None) -> None:
    if figure is not None:
        axes.axvline(figure["value"], color=_INK["training"], linestyle="--", label="bound")


def _range(spread: Sequence[float] | None) -> str:
    return "" if spread is None else f"{number(spread[0])} – {number(spread[1])}"


def _value(value: float) -> str:
    """Three digits after the point, unless all that matters lies behind them."""
    return f"{value:.3f}" if not value or abs(value) >= 1e-3 else f"{value:.1e}"
