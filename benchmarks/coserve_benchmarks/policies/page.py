"""Report page of a run: one self-contained HTML file without scripts.

It is made from the dictionary that a run returns, or from the JSON it wrote. Sections of what was not run
are left out. `page.html` is the template, `tables` what its cells say. Needs matplotlib.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coserve_benchmarks.drawing import style, svg_of
from coserve_benchmarks.policies import figures, tables
from coserve_benchmarks.policies.charts import Inks

_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PROMISE: Final = "Hollow marks: fewer than 99% of the requests were within their bounds."
_OUTCOME: Final = (
    "Left: the further left the better; bounds on the whole answer are dashed. "
    "Right: the dotted line is at 99%; above and to the right is better."
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as an image that stands in the page: a `data:` address, and what it shows."""

    source: str
    caption: str


def write_page(results: Mapping[str, Any], path: str | Path) -> None:
    """Writes the page of a run; folders that are missing are made."""
    inks, ours = figures.inks_of(results), figures.ours_of(results)
    with style():
        page = _TEMPLATES.get_template("page.html").render(
            results=results,
            inks=inks,
            ours=ours,
            header=_header(results),
            keys=tables.keys(results),
            glance=tables.glance(results),
            workloads=[
                _workload(f"w{place}", key, workload, inks, ours)
                for place, (key, workload) in enumerate(figures.workloads_of(results).items())
            ],
            sweeps=_sweeps(results, inks),
            switch=tables.switch(results.get("switch") or {}),
            absolute=tables.absolute(results),
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.lstrip(), encoding="utf-8")


def _header(results: Mapping[str, Any]) -> dict[str, str]:
    parameters = results.get("parameters")
    millions = "" if parameters is None else f" ({parameters / 1e6:.0f}M parameters)"
    quick = ", a quick run" if results.get("quick") else ""
    machine = _machine(results.get("machine", {}))
    model = f"{results.get('shape', '')}{millions}{quick}"
    return {"model": model, "machine": machine, "date": str(results.get("date", ""))}


def _machine(machine: Mapping[str, Any]) -> str:
    said = {
        "cpu": "{}",
        "threads": "{} threads",
        "torch_version": "torch {}",
        "bandwidth": "reads {:.0f} GB/s",
        "matrix_rate": "multiplies {:.0f} GFLOP/s",
    }
    rates = {key: machine[key] / 1e9 for key in ("bandwidth", "matrix_rate") if key in machine}
    known = {**machine, **rates}
    return ", ".join(text.format(known[key]) for key, text in said.items() if key in known)


def _workload(id: str, key: str, workload: Mapping[str, Any], inks: Inks, ours: str) -> dict[str, Any]:
    scale = str(workload.get("scale") or "")
    sentences = [f"{scale[:1].upper()}{scale[1:]}."] if scale else []
    if workload.get("seconds") is not None:
        sentences.append(f"Requests arrive for {workload['seconds']:g} s.")
    over_time = f"{ours} over time: how both throughputs follow the arrivals (as FlexLLM's figure 16)."
    runs = figures.runs_of(workload)
    return {
        "id": id,
        "key": key,
        "title": str(workload.get("title", key)),
        "said": " ".join(sentences),
        "bounds": workload.get("bounds") or {},
        "table": tables.contestants(workload),
        "figures": [
            _drawn(figures.outcome(workload, inks), _OUTCOME),
            _drawn(figures.over_time(workload, ours, inks), over_time),
        ],
        "notes": {name: run["note"] for name, run in runs.items() if run.get("note")},
    }


def _sweeps(results: Mapping[str, Any], inks: Inks) -> Drawn | None:
    there = results.get("sweeps") or {}
    papers = "; ".join(f"{one.title.lower()}: {one.paper}" for one in figures.SWEEPS if there.get(one.key))
    return _drawn(figures.sweeps(results, inks), f"What they show: {papers}. {_PROMISE}")


def _drawn(figure: Any | None, caption: str) -> Drawn | None:
    if figure is None:
        return None
    return Drawn(f"data:image/svg+xml;base64,{b64encode(svg_of(figure).encode()).decode()}", caption)
