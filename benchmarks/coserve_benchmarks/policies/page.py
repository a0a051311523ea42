"""The page that a run is shown as: one HTML file with nothing outside it, and nothing that runs.

It is made from the dictionary that a run returns, or from the JSON it wrote. Sections of what was not run
are left out. Needs matplotlib.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

from coserve_benchmarks.policies import tables
from coserve_benchmarks.policies.drawing import charts, figures, ink
from coserve_benchmarks.policies.drawing.charts import Inks
from coserve_benchmarks.policies.drawing.figures import draw
from coserve_benchmarks.policies.drawing.vector import inline

__all__ = ["draw", "write_page"]

_STYLE: Final = Path(__file__).with_name("page.css")
_NAMES: Final = {
    "text": ink.TEXT,
    "muted": ink.MUTED,
    "rule": ink.RULE,
    "grid": ink.GRID,
    "bound": ink.BOUND,
    "output": ink.OUTPUT,
    "page": ink.PAGE,
}
# Colours of the page alone: for light, and for dark.
_OWN: Final = {
    "raised": ("#f3f5f8", "#1d222a"),
    "bar": ("#9db4d0", "#47617f"),
    "good": ("#14784f", "#57c796"),
    "fair": ("#9a6700", "#e2b04a"),
    "bad": ("#b42332", "#ff8a8f"),
}
_PROMISE: Final = "Hollow marks: fewer than 99% of the requests were within their bounds."


def write_page(results: Mapping[str, Any], path: str | Path) -> None:
    """Writes the page of a run; folders that are missing are made."""
    inks = figures.inks_of(results)
    with charts.style():
        body = "".join((_header(results), _verdicts(results, inks), _workloads(results, inks)))
        body += "".join((_sweeps(results, inks), _switch(results), _notes(results)))
    style = f"<style>\n{_colors(inks)}\n{_STYLE.read_text(encoding='utf-8')}</style>"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>coserve: policies on {escape(str(results.get('shape', 'a model')))}</title>"
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = f'<html lang="en"><head>{head}\n{style}</head>\n<body><main>{body}</main></body></html>'
    path.write_text(f"<!doctype html>\n{page}\n", encoding="utf-8")


def _header(results: Mapping[str, Any]) -> str:
    machine = results.get("machine", {})
    said = {
        "model": _model(results),
        "machine": _machine(machine),
        "date": results.get("date", ""),
    }
    lines = "".join(f"<dt>{name}</dt><dd>{escape(str(text))}</dd>" for name, text in said.items() if text)
    if results.get("command"):
        lines += f"<dt>command</dt><dd><code>{escape(str(results['command']))}</code></dd>"
    links = "".join(
        f'<a href="#w{place}">{escape(key)}</a>' for place, key in enumerate(figures.workloads_of(results))
    )
    links += '<a href="#sweeps">sweeps</a>' if results.get("sweeps") else ""
    links += '<a href="#switch">switching</a>' if results.get("switch") else ""
    title = "<h1>Scheduling policies, judged on traffic</h1>"
    return f"<header>{title}<dl>{lines}</dl><nav>{links}</nav></header>\n"


def _model(results: Mapping[str, Any]) -> str:
    parameters = results.get("parameters")
    millions = "" if parameters is None else f" ({parameters / 1e6:.0f}M parameters)"
    quick = ", a quick run" if results.get("quick") else ""
    return f"{results.get('shape', '')}{millions}{quick}"


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [str(machine["cpu"])] if "cpu" in machine else []
    if "threads" in machine:
        parts.append(f"{machine['threads']} threads")
    if "torch_version" in machine:
        parts.append(f"torch {machine['torch_version']}")
    if "bandwidth" in machine:
        parts.append(f"reads {machine['bandwidth'] / 1e9:.0f} GB/s")
    if "matrix_rate" in machine:
        parts.append(f"multiplies {machine['matrix_rate'] / 1e9:.0f} GFLOP/s")
    return ", ".join(parts)


def _verdicts(results: Mapping[str, Any], inks: Inks) -> str:
    bars = tables.keys(results)
    glance = tables.glance(results, inks, figures.ours_of(results))
    found = ""
    if bars:
        found += f'<section id="keys"><h2>Against the bars</h2>{bars}</section>\n'
    if glance:
        said = "Fine-tuning tokens/s, and the share of requests that were within the workload's first bound."
        found += f'<section id="glance"><h2>At a glance</h2><p class="quiet">{said}</p>{glance}</section>\n'
    return found


def _workloads(results: Mapping[str, Any], inks: Inks) -> str:
    return "".join(
        _workload(place, key, workload, inks, figures.ours_of(results))
        for place, (key, workload) in enumerate(figures.workloads_of(results).items())
    )


def _workload(place: int, key: str, workload: Mapping[str, Any], inks: Inks, ours: str) -> str:
    scale = str(workload.get("scale") or "")
    sentences = [f"{scale[:1].upper()}{scale[1:]}."] if scale else []
    if workload.get("seconds") is not None:
        sentences.append(f"Requests arrive for {workload['seconds']:g} s.")
    said = f'<p class="quiet">{escape(" ".join(sentences))}</p>' if sentences else ""
    bounds = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(str(text))}</dd>"
        for label, text in workload.get("bounds", {}).items()
    )
    title = escape(str(workload.get("title", key)))
    parts = [f'<section id="w{place}"><h2>{title}</h2>{said}', f"<dl>{bounds}</dl>" if bounds else ""]
    parts.append(tables.contestants(workload, inks, ours))
    outcome = "Left: the further left the better; bounds on the whole answer are dashed. "
    outcome += "Right: the dotted line is at 99%; above and to the right is better."
    over_time = f"{ours} over time: how both throughputs follow the arrivals (as FlexLLM's figure 16)."
    drawn = (
        ("o", figures.outcome(workload, inks), outcome),
        ("f", figures.over_time(workload, ours, inks), over_time),
    )
    parts += [_figure(figure, f"w{place}{letter}", caption, inks) for letter, figure, caption in drawn]
    notes = {name: run["note"] for name, run in figures.runs_of(workload).items() if run.get("note")}
    return "".join((*parts, _noted(notes), "</section>\n"))


def _sweeps(results: Mapping[str, Any], inks: Inks) -> str:
    figure = figures.sweeps(results, inks)
    if figure is None:
        return ""
    papers = (
        f"{sweep.title.lower()}: {sweep.paper}"
        for sweep in figures.SWEEPS
        if results["sweeps"].get(sweep.key)
    )
    caption = f"What they show: {'; '.join(papers)}. {_PROMISE}"
    return f'<section id="sweeps"><h2>Sweeps</h2>{_figure(figure, "s", caption, inks)}</section>\n'


def _switch(results: Mapping[str, Any]) -> str:
    if not results.get("switch"):
        return ""
    said = (
        "Where two figures have a stroke between them, the first is fine-tuning's, the second inference's. "
        "What is quoted is table 1 of the FineInfer paper: Llama2-7B on an NVIDIA 3090, not on this machine."
    )
    inner = f'<h2>What a switch costs</h2><p class="quiet">{said}</p>{tables.switch(results["switch"])}'
    return f'<section id="switch">{inner}</section>\n'


def _notes(results: Mapping[str, Any]) -> str:
    found = _noted(results.get("notes", {}))
    absolute = tables.absolute(results)
    if absolute:
        found += f"<details><summary>All absolute figures</summary>{absolute}</details>"
    return f'<section id="notes"><h2>How it was measured</h2>{found}</section>\n' if found else ""


def _noted(notes: Mapping[str, str]) -> str:
    lines = "".join(f"<dt>{escape(str(n))}</dt><dd>{escape(str(text))}</dd>" for n, text in notes.items())
    return f'<dl class="notes">{lines}</dl>' if lines else ""


def _figure(figure: Any | None, key: str, caption: str, inks: Inks) -> str:
    if figure is None:
        return ""
    colors = {color: f"var(--{name})" for name, color in _NAMES.items()}
    colors |= {found.color: f"var(--c{place})" for place, found in enumerate(inks.values())}
    svg = inline(figure, key, caption, colors)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _colors(inks: Inks) -> str:
    """Every colour as a variable of the style, for light and for dark."""
    light = {name: color for name, color in _NAMES.items()}
    light |= {name: color for name, (color, _) in _OWN.items()}
    light |= {f"c{place}": found.color for place, found in enumerate(inks.values())}
    dark = {name: ink.DARK[color] for name, color in _NAMES.items()}
    dark |= {name: color for name, (_, color) in _OWN.items()}
    dark |= {f"c{place}": found.on_dark for place, found in enumerate(inks.values())}
    return f":root {{ {_css(light)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_css(dark)} }} }}"


def _css(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())
