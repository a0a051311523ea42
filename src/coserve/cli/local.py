"""`coserve demo` and `coserve bench`: commands that need no server."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coserve.cli.exits import INTERRUPTED
from coserve.errors import ConfigError

bench = typer.Typer(
    help="Measures this machine, beside other ways to do the same work.", no_args_is_help=True
)
Figures = Annotated[Path | None, typer.Option("--json", help="File for all figures.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: a check that everything runs.")]
Only = Annotated[list[str] | None, typer.Option(metavar="GROUP", help="A group of figures; may be repeated.")]
Shape = Annotated[str, typer.Option(help="Name of the model shape.")]


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="JSONL to train on, instead of two new tasks."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="Azure LLM trace to replay, instead of conversations.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a causal language model, not the embedded one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of training; the other acts are in proportion.")
    ] = 75.0,
    conversations: Annotated[int, typer.Option(min=1, max=64, help="Conversations at any time.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, or cuda, cuda:1, ...")] = "cpu",
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, as when piped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="The closing tables only.")] = False,
    json_file: Figures = None,
) -> None:
    """Streams conversations while two adapters are trained, and measures both."""
    check_writable("--json", json_file)
    from coserve.demo.story import Options, Story
    from coserve.demo.view import make_view

    chosen = Options(data, trace, model, device, seconds, conversations)
    report = Story(chosen, make_view(plain, quiet)).tell()
    _write_json(json_file, report.as_dict())
    if report.stopped:
        raise typer.Exit(INTERRUPTED)


@bench.command()
def engine(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    plans: Annotated[
        Path | None, typer.Option(help="File for the training in the co-serving run's plans.")
    ] = None,
) -> None:
    """Serving, training, and both at once, beside their floors and other programs."""
    check_writable("--json", json_file)
    check_writable("--plans", plans)
    from coserve.bench.engine import run_engine
    from coserve.bench.report import print_report

    print_report(run_engine(shape, quick, only or None, json_file, plans))


@bench.command()
def server(json_file: Figures = None, quick: Quick = False, only: Only = None, shape: Shape = "255m") -> None:
    """What HTTP costs beside the engine alone, and what is left of streams and jobs after kill -9."""
    check_writable("--json", json_file)
    from coserve.bench.report import print_report
    from coserve.bench.server import run_server

    print_report(run_server(shape, quick, only or None, json_file))


@bench.command()
def methods(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None, typer.Option(help="File for the loss curves, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """Every adapter method: against its oracle, beside the others in one step, and while it learns."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve.bench.methods.curves import draw
    from coserve.bench.methods.run import run_methods
    from coserve.bench.report import print_report

    results = run_methods(shape, quick, only or None, json_file)
    if picture is not None:
        draw(results, picture)
    print_report(results)


@bench.command()
def adapters(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None,
        typer.Option(help="File for throughput over adapters and batches, as SVG or PNG by its ending."),
    ] = None,
) -> None:
    """Many adapters in one step: beside one and none, beside PEFT, training, and paged in from disk."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve.bench.adapters.drawing import draw
    from coserve.bench.adapters.run import run_adapters
    from coserve.bench.report import print_report

    results = run_adapters(shape, quick, only or None, json_file)
    if picture is not None and "figure" in results:
        draw(results, picture)
    print_report(results)


@bench.command()
def policies(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Annotated[str | None, typer.Option(help="255m, or 19m when --quick.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Azure LLM trace to replay too."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="CSV or JSONL with texts that requests ask."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds that requests arrive in, each run.")
    ] = None,
    further: Annotated[
        bool, typer.Option("--further", help="Keep what FILE of --json has of other groups.")
    ] = False,
    server: Annotated[
        bool, typer.Option("--server", help="Replay over HTTP, against a server for each round.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="File for the report, as HTML.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="File for the summary picture, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """Every scheduling policy on the papers' traffic and a recorded one, and what one would do instead."""
    for flag, path in (("--json", json_file), ("--page", page), ("--picture", picture)):
        check_writable(flag, path)
    from coserve.bench.policies.page import draw, write_page
    from coserve.bench.policies.run import run_policies
    from coserve.bench.report import print_report

    results = run_policies(shape, quick, only or None, json_file, trace, prompts, seconds, further, server)
    if page is not None:
        write_page(results, page)
    if picture is not None:
        draw(results, picture)
    print_report(results)


@bench.command()
def memory(
    json_file: Figures = None,
    quick: Quick = False,
    only: Only = None,
    shape: Shape = "255m",
    picture: Annotated[
        Path | None, typer.Option(help="File for the ablation, as SVG or PNG by its ending.")
    ] = None,
) -> None:
    """What training keeps, what the ledger and the plan say beside what is measured, what is shared."""
    check_writable("--json", json_file)
    check_writable("--picture", picture)
    from coserve.bench.memory.ablation import draw_ablation
    from coserve.bench.memory.run import run_memory
    from coserve.bench.report import print_report

    results = run_memory(shape, quick, only or None, json_file)
    if picture is not None and "ablation" in results:
        draw_ablation(results, picture)
    print_report(results)


def check_writable(flag: str, path: Path | None) -> None:
    """Better to find out before minutes of work than after."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {path}: expected a file in a folder that exists")


def _write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error
