"""`coserve simulate`: the real scheduler on hardware that is modelled."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coserve.cli.options import check_writable
from coserve.cli.simulate_options import read_settings, read_slo, read_wanted
from coserve.core.checkout import measured_code
from coserve.core.compact import compact_json
from coserve.core.size import read_size
from coserve.errors import ConfigError

if TYPE_CHECKING:
    from coserve.simulate.advise import Wanted
    from coserve.simulate.loads import SimulatedLoad
    from coserve.simulate.runs import FleetSettings
    from coserve.simulate.sweep import Cell, Progress

_POLICY = "hybrid"
_MODEL = "8b"
_EVERY = 0.1  # seconds between two updates of the progress
_CHECKED = "19m"  # what --check runs on this machine, where no other shape is asked for


def simulate(
    model: Annotated[str, typer.Option(help="A bench shape such as 8b, or a model's folder.")] = _MODEL,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help="a100-40, a100-80, a10g, l4, l40s, rtx-3090, h100, h200, b200, or a .toml; may be repeated."
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="As in `coserve serve`; may be repeated.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Recorded requests: Azure's, BurstGPT's or Mooncake's format.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests a second, of a trace on average; else as recorded. May be repeated."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of prompts, without a trace.")] = 256,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of answers, without a trace.")] = 64,
    arrivals: Annotated[
        str, typer.Option(help="poisson, bursty, steady or spread, without a trace.")
    ] = "poisson",
    slo: Annotated[
        str,
        typer.Option(
            help="Bounds in seconds, as first_token=1,between_tokens=0.05,end_to_end=20; or ttft, tpot, e2e."
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(help="Simulated seconds.")] = 120.0,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, for intervals.")] = 1,
    engines: Annotated[int, typer.Option(min=1, help="Independent engines behind a router.")] = 1,
    degree: Annotated[int, typer.Option(min=1, help="Devices that share each engine's model.")] = 1,
    stages: Annotated[
        int, typer.Option(min=1, help="Stages of a pipeline in each engine, of --degree devices each.")
    ] = 1,
    router: Annotated[str, typer.Option(help="least-loaded or round-robin.")] = "least-loaded",
    jobs: Annotated[int, typer.Option(min=0, help="Fine-tuning jobs without end on each engine.")] = 1,
    train_batch: Annotated[int, typer.Option(min=1, help="Examples of an optimizer step.")] = 4,
    train_length: Annotated[int, typer.Option(min=1, help="Tokens of an example.")] = 512,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters that requests name.")] = 0,
    skew: Annotated[float, typer.Option(min=0, help="Exponent of their popularity's power law.")] = 1.0,
    rank: Annotated[int, typer.Option(min=1, help="Rank of all adapters.")] = 16,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences at once on an engine.")] = 256,
    cache_tokens: Annotated[
        int | None, typer.Option(min=16, help="Of an engine; else as many as fit.")
    ] = None,
    base_memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Of each device for the base, such as 10GB; the rest is streamed."),
    ] = "",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE[,VALUE]", help="A setting of the scheduler; several values for --advise."
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str],
        typer.Option(metavar="A B", help="Compare two policies, with intervals over --seeds."),
    ] = ("", ""),
    advise: Annotated[
        bool, typer.Option("--advise", help="Find the cheapest fleet that holds --slo under the load.")
    ] = False,
    hold: Annotated[
        bool,
        typer.Option(
            "--hold",
            help="Find the most requests a second that the fleet holds --slo at, and its fine-tuning beside.",
        ),
    ] = False,
    within: Annotated[float, typer.Option(help="Share of requests within --slo: --advise, --hold.")] = 0.99,
    training: Annotated[
        float, typer.Option(help="Fine-tuning tokens a second, at least: --advise, --hold.")
    ] = 0.0,
    most: Annotated[int, typer.Option(min=1, help="Most devices, for --advise.")] = 64,
    price: Annotated[
        list[str] | None, typer.Option(metavar="HARDWARE=PRICE", help="Of a device, for --advise; else 1.")
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="Instead, measure this machine with --model, and write its table there (.toml)."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Instead, measure the simulator's errors on this machine, its speed and the papers.",
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, for --check.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Groups of --check: errors, scale, published; flexllm, fineinfer, report, blockllm, "
            "symbiosis; may be repeated."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", metavar="FILE")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture, SVG or PNG by its ending.")] = None,
    page: Annotated[Path | None, typer.Option(help="File for all of it on one HTML page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="File for the steps of the first run, for Perfetto.")
    ] = None,
) -> None:
    """Answers a load on hardware that is elsewhere: the real scheduler and policies, on modelled seconds.

    Prints shares within bounds, latencies and fine-tuning, by policy, hardware and rate. Tables of hardware
    are data sheets with assumed efficiencies, or measured: see docs/simulate.md.
    """
    drawn = {"--plot": plot, "--page": page, "--perfetto": perfetto}
    for flag, path in {"--json": json_file, "--measure": measure, **drawn}.items():
        check_writable(flag, path)
    if advise and (flags := [flag for flag, path in drawn.items() if path is not None]):
        raise ConfigError(f"--advise draws nothing: {flags[0]} is for a sweep of the fleet that it names")
    if advise or hold:
        others = {"--hold": advise and hold, "--compare": any(compare), "--rate": hold and bool(rate)}
        if wrong := [flag for flag, is_there in others.items() if is_there]:
            raise ConfigError(f"{'--advise' if advise else '--hold'} does not go with {wrong[0]}")
        if hold and not slo:
            raise ConfigError("--hold needs bounds to hold, as --slo first_token=1,between_tokens=0.05")
    if measure is not None:
        from coserve.cli.simulate_measure import measure as measure_here

        return measure_here(model, measure)
    if check:
        return _check(_CHECKED if model == _MODEL else model, quick, only, json_file)
    from coserve.simulate.loads import SimulatedLoad, TrainingLoad
    from coserve.simulate.models import model_shape
    from coserve.simulate.runs import FleetSettings
    from coserve.workload.requests import ServedAdapters
    from coserve.workload.trace_formats import read_trace

    choices = read_settings(setting or [])
    load = SimulatedLoad(
        seconds,
        rate[0] if rate else 1.0 if hold else None,
        tuple(read_trace(trace)) if trace is not None else (),
        prompt,
        answer,
        arrivals,
        read_slo(slo),
        ServedAdapters(adapters, rank, skew),
        TrainingLoad(jobs, train_batch, train_length),
    )
    policies = [name for name in compare if name] or policy or [_POLICY]
    settings = FleetSettings(
        model_shape(model),
        "",
        engines=engines,
        degree=degree,
        stages=stages,
        router=router,
        rank=rank,
        max_running=max_running,
        cache_tokens=cache_tokens,
        base_memory=read_size(base_memory) if base_memory else None,
        scheduler={name: values[0] for name, values in choices.items()},
    )
    devices = hardware or ["h100"]
    results = _head(settings, load, devices)
    numbers = range(seed, seed + seeds)
    wanted, refusal = read_wanted(within, training, most, price or [], devices), ""
    with _progress() as progress:
        if advise:
            found, refusal = _advise(settings, load, wanted, policies, devices, choices, numbers, progress)
            results |= found
        elif hold:
            cells, held, refusal = _hold(settings, load, wanted, policies, devices, numbers, progress)
            results |= {"cells": [cell.as_dict() for cell in cells], "held": held}
        else:
            cells = _sweep(settings, load, policies, devices, rate or [None], numbers, progress)
            results["cells"] = [cell.as_dict() for cell in cells]
            if any(compare):
                results["compare"] = _compare(cells)
    if json_file is not None:
        json_file.write_text(compact_json(results), encoding="utf-8")
    if refusal:
        raise ConfigError(refusal)
    if plot is not None and "cells" in results:
        from coserve.cli.simulate_picture import draw

        draw(results["cells"], f"{settings.shape.name}, {seconds:g} s, {seeds} seeds", plot)
    if page is not None and "cells" in results:
        from coserve.cli.simulate_picture import write_page

        write_page(results, _COLUMNS, [_row(cell) for cell in cells], page)
    if perfetto is not None:
        _perfetto(replace(settings, hardware=devices[0], policy=policies[0]), load, seed, perfetto)


# Running


def _head(settings: "FleetSettings", load: "SimulatedLoad", hardware: Sequence[str]) -> dict[str, Any]:
    """The settings and the load of a simulation, for the JSON. Raises ConfigError for unknown hardware."""
    from coserve.simulate.times import table_named

    tables = {name: table_named(name) for name in hardware}
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "code": measured_code(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": asdict(settings.shape),
        "engines": settings.engines,
        "degree": settings.degree,
        "stages": settings.stages,
        "base_memory": settings.base_memory,
        "load": {
            "seconds": load.seconds,
            "requests in trace": len(load.trace),
            "prompt": load.prompt,
            "answer": load.answer,
            "arrivals": load.arrivals,
            "slo": asdict(load.slo),
            "training": asdict(load.training),
            "adapters": load.adapters.count,
        },
        "hardware": {
            name: {"name": table.name, "sources": dict(table.sources), "jitter": asdict(table.jitter)}
            for name, table in tables.items()
        },
    }


def _sweep(
    settings: "FleetSettings",
    load: "SimulatedLoad",
    policies: Sequence[str],
    hardware: Sequence[str],
    rates: Sequence[float | None],
    seeds: Sequence[int],
    progress: "Progress",
) -> "list[Cell]":
    """Runs all cells, and prints their table."""
    from coserve.simulate.sweep import sweep

    cells = [*sweep(settings, load, policies, hardware, rates, seeds, progress)]
    _print_cells(cells)
    return cells


def _print_cells(cells: "Sequence[Cell]") -> None:
    from coserve.cli.output import print_table

    print_table(_COLUMNS, [_row(cell) for cell in cells], "")
    for refusal in dict.fromkeys(cell.refusal for cell in cells if cell.refusal):
        print(f"requests were refused, such as: {refusal}")


def _hold(
    settings: "FleetSettings",
    load: "SimulatedLoad",
    wanted: "Wanted",
    policies: Sequence[str],
    hardware: Sequence[str],
    seeds: Sequence[int],
    progress: "Progress",
) -> "tuple[list[Cell], list[dict[str, Any]], str]":
    """Finds the highest rates, and prints them: (cells, for JSON, why there are none)."""
    from coserve.simulate.holding import hold

    fleets = [replace(settings, policy=policy, hardware=device) for device in hardware for policy in policies]
    cells: list[Cell] = []
    held: list[dict[str, Any]] = []
    told: list[str] = []
    for fleet in fleets:
        name = f"{fleet.devices} x {fleet.hardware} under {fleet.policy}"
        if (found := hold(fleet, load, wanted, seeds, progress)) is None:
            told.append(f"{name} hold no rate of which {load.seconds:g} s tell anything")
            continue
        cells += found.cells
        held.append(found.as_dict())
        training = found.cells[-1].mean("training") or 0.0
        told.append(
            f"{name} hold {found.rate:.3g} requests/s, and train {training:,.0f} tokens/s beside them"
        )
        told += [
            f"  but not {cell.rate:.3g} requests/s, with {cell.mean('within') or 0.0:.1%} within their bounds"
            for cell in found.missed(wanted)
        ]
    if not held:
        return [], [], told[0]
    _print_cells(cells)
    print("\n".join(told))
    _warn_of_few(cells, wanted)
    return cells, held, ""


_COLUMNS = (
    "policy", "hardware", "devices", "requests/s", "requests", "within", "TTFT p50 s", "TTFT p99 s",
    "ms/token", "gap p99 ms", "output tok/s", "training tok/s",
)  # fmt: skip


def _row(cell: "Cell") -> tuple[str, ...]:
    def said(name: str, digits: int, factor: float = 1.0) -> str:
        value = cell.mean(name)
        return "" if value is None else f"{value * factor:,.{digits}f}"

    return (
        cell.policy,
        cell.hardware,
        str(cell.devices),
        "as recorded" if cell.rate is None else f"{cell.rate:g}",
        said("requests", 0),
        f"{said('within', 1, 100)} %",
        said("ttft_p50", 3),
        said("ttft_p99", 3),
        said("time_per_token_mean", 2, 1e3),
        said("gap_p99", 1, 1e3),
        said("output", 0),
        said("training", 0),
    )


def _compare(cells: "Sequence[Cell]") -> list[dict[str, Any]]:
    """Compares the two policies of each pair of cells, and prints it."""
    from coserve.cli.output import print_table
    from coserve.simulate.sweep import compare

    found: list[dict[str, Any]] = []
    for first, second in zip(cells[::2], cells[1::2], strict=True):
        rows = []
        for one in compare(first, second):
            ends = one.interval
            said = "one seed tells nothing" if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"
            rows.append((one.name, f"{one.first:.4g}", f"{one.second:.4g}", f"{one.difference:+.4g}", said))
            found.append({"hardware": first.hardware, "rate": first.rate, **asdict(one), "sure": one.is_sure})
        at = "" if first.rate is None else f" at {first.rate:g} requests/s"
        print(
            f"{second.policy} less {first.policy}, on {first.hardware}{at}, {len(first.runs)} paired seeds:"
        )
        print_table(
            ("", first.policy, second.policy, "difference", "95 % interval"), rows, "nothing to compare"
        )
    return found


def _advise(
    settings: "FleetSettings",
    load: "SimulatedLoad",
    wanted: "Wanted",
    policies: Sequence[str],
    hardware: Sequence[str],
    choices: dict[str, list[Any]],
    seeds: Sequence[int],
    progress: "Progress",
) -> tuple[dict[str, Any], str]:
    """Finds the cheapest fleets, and prints them: (for JSON, why there are none)."""
    from coserve.cli.output import print_table
    from coserve.simulate.advise import advise

    missed: list[Cell] = []
    found = advise(
        settings,
        load,
        wanted,
        policies,
        hardware,
        choices=choices,
        seeds=seeds,
        progress=progress,
        miss=missed.append,
    )
    results = {"wanted": asdict(wanted), "advice": [advice.as_dict() for advice in found]}
    if not found:
        refusal = f"no fleet of at most {wanted.devices} devices holds it"
        if not missed:
            return results, refusal
        nearest = max(missed, key=lambda cell: (cell.mean("within") or 0.0, cell.mean("training") or 0.0))
        return results, f"{refusal}; the nearest that was tried: {wanted.missed(nearest)}"
    columns = ("price", "engines x devices", "settings", *_COLUMNS)
    rows = [
        (
            f"{advice.price:g}",
            f"{advice.settings.engines} x {advice.settings.engine_devices}",
            ", ".join(f"{name}={value}" for name, value in advice.settings.scheduler.items()),
            *_row(advice.cell),
        )
        for advice in found
    ]
    print_table(columns, rows, "")
    _warn_of_few([advice.cell for advice in found], wanted)
    return results, ""


def _warn_of_few(cells: "Sequence[Cell]", wanted: "Wanted") -> None:
    """Says where runs have fewer requests than the share within their bounds can be told of."""
    fewest = min(cell.mean("requests") or 0.0 for cell in cells)
    if wanted.within < 1 and fewest * (1 - wanted.within) < 1:
        print(
            f"{fewest:,.0f} requests a run tell little of a share of {wanted.within:.4g}: more --seconds do"
        )


def _check(shape: str, quick: bool, only: list[str] | None, json_file: Path | None) -> None:
    """Runs the check, and prints its rows."""
    from coserve.cli.bench import run_check
    from coserve.cli.output import print_table

    found = run_check(shape, quick, only, json_file)
    met = {True: "met", False: "missed", None: ""}
    rows = [
        (key, f"{found[key]:.4g}" if key in found else "not measured", bar, met[found["met"].get(key)])
        for key, bar in found["bars"].items()
    ]
    print_table(("key", "measured", "bar", ""), rows, "")


def _perfetto(settings: "FleetSettings", load: "SimulatedLoad", seed: int, path: Path) -> None:
    from coserve.simulate.runs import Simulator
    from coserve.simulate.tracing import PerfettoTrace

    trace = PerfettoTrace()
    found = Simulator(settings, load).run(seed, watch=trace.watch)
    trace.requests(found.answers)
    trace.write(path)
    print(f"{path}: open it at https://ui.perfetto.dev")


@contextmanager
def _progress() -> "Iterator[Progress]":
    """Shows on a terminal how far each cell is; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda name, share: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}
        shown = float("-inf")

        def show(name: str, share: float) -> None:
            nonlocal shown
            if (now := time.monotonic()) - shown < _EVERY and name in tasks:
                return
            shown = now
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=1.0)
            bars.update(tasks[name], completed=share)

        yield show
